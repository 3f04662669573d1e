"""Low-rank products of adapters: shrink and expand, for prompts and decode rows alike.

A program has a tile of tokens and every n-th slot, and skips slots that none of its tokens has. So tokens need not be sorted, and grids
depend on shapes alone, as CUDA graphs require.
"""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.stream import Activation, RowClass
from models.kernels.triton.activations import single_of
from models.kernels.triton.launch import await_previous_kernel, early_launch, floats
from models.kernels.triton.lora_single import adapted_gemv
from models.kernels.triton.text import swiglu
from models.lora.low_rank import BLOCK_ROWS, LowRank, Out, Product
from models.weights.plain import Plain

RANKS = tl.constexpr(16)  # rank of a tile, see `RANK_STEP`
LEAST_TOKENS, MOST_TOKENS = 16, 64  # of a tile
COLUMNS = 128  # inputs of one product of tiles
SPLIT_COLUMNS, MOST_SPLITS = 1024, 8  # of the inputs, with few tokens
FEW_TOKENS = 256  # with more, tokens of a tile have mostly one slot
SHRINK_SLOTS = 16  # most programs that share the slots of a tile with few tokens
EXPAND_SLOTS = 4  # slots of a program with few tokens
WARPS, MANY_WARPS = 4, 8  # many: of the larger tile when expanding


@triton.jit
def _slots_between(slot_of_token: tensor, NUM_SLOTS: constexpr) -> tuple[tensor, tensor]:
    """Return the least slot of the tokens and the number after the largest."""
    return tl.min(tl.where(slot_of_token < 0, NUM_SLOTS, slot_of_token), 0), tl.max(slot_of_token, 0) + 1


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    x: tensor, a: tensor, slots: tensor, ranks: tensor, out: tensor, num_tokens: tensor, WIDTH: constexpr, NUM_SLOTS: constexpr,
    GROUPS: constexpr, RANK: constexpr, SPLIT_WIDTH: constexpr, TOKENS: constexpr, COLUMNS: constexpr, MANY: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (t, (split, group, ranks), slots): A @ x over a part of the inputs."""
    first = tl.program_id(1) % (RANK // RANKS) * RANKS
    group = tl.program_id(1) // (RANK // RANKS) % GROUPS
    split = tl.program_id(1) // (RANK // RANKS * GROUPS)
    row, end = first + tl.arange(0, RANKS), min(WIDTH, (split + 1) * SPLIT_WIDTH)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inputs, place = token[:, None] * WIDTH, (split * num_tokens + token)[:, None] * (GROUPS * RANK) + group * RANK + row[None, :]
    slot_of_token = tl.load(slots + token, token < num_tokens, -1)
    first_slot, last_slot, step = tl.program_id(2), NUM_SLOTS, tl.num_programs(2)
    if MANY:
        first_slot, last_slot = _slots_between(slot_of_token, NUM_SLOTS)
    num_ranks = tl.load(ranks + first_slot * GROUPS + group, first_slot < last_slot, 0)
    await_previous_kernel(OVERLAP)
    for slot in range(first_slot, last_slot, step):
        own = slot_of_token == slot
        if (first < num_ranks) & (tl.max(own.to(tl.int32), 0) > 0):
            matrix = a + (slot * GROUPS + group).to(tl.int64) * RANK * WIDTH + row[None, :] * WIDTH
            total = tl.zeros((TOKENS, RANKS), tl.float32)
            for start in range(split * SPLIT_WIDTH, end, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                values = tl.load(x + inputs + column[None, :], own[:, None] & (column < end)[None, :], 0.0)
                weights = tl.load(matrix + column[:, None], (column < end)[:, None], 0.0)
                total = tl.dot(values, weights, total, input_precision="ieee")
            tl.store(out + place, total, own[:, None])
        num_ranks = tl.load(ranks + (slot + step) * GROUPS + group, slot + step < last_slot, 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    shrunk: tensor, b: tensor, slots: tensor, ranks: tensor, blocks: tensor, out: tensor, num_tokens: tensor, stride: tensor,
    OUT: constexpr, NUM_SLOTS: constexpr, SLOTS: constexpr, GROUPS: constexpr, RANK: constexpr, SPLITS: constexpr, TOKENS: constexpr,
    ROWS: constexpr, ALIGNMENT: constexpr, MANY: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (t, block, slots): out += B @ (the sum of `shrunk`) for rows of one group. B of several slots is one matrix with their
    ranks as columns, and `shrunk` of a token is 0 but for those of its slot."""
    begin = tl.multiple_of(tl.load(blocks + tl.program_id(1) * 3), ALIGNMENT)
    end = tl.multiple_of(tl.load(blocks + tl.program_id(1) * 3 + 1), ALIGNMENT)
    group = tl.load(blocks + tl.program_id(1) * 3 + 2)
    row, rank, column = begin + tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, SLOTS * RANKS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot_of_token = tl.load(slots + token, token < num_tokens, -1)
    first_slot, last_slot = tl.program_id(2) * SLOTS, min(NUM_SLOTS, (tl.program_id(2) + 1) * SLOTS)
    if MANY:
        first_slot, last_slot = _slots_between(slot_of_token, NUM_SLOTS)
    is_own = (slot_of_token >= first_slot) & (slot_of_token < last_slot)
    num_ranks = tl.load(ranks + slot_of_token * GROUPS + group, is_own, 0)
    inside = (num_ranks > 0)[:, None] & (row < end)[None, :]
    most = tl.max(num_ranks, 0)
    await_previous_kernel(OVERLAP)
    if most > 0:
        total = tl.zeros((TOKENS, ROWS), tl.float32)
        for first in range(0, most, RANKS):
            values = tl.zeros((TOKENS, RANKS), tl.float32)
            for split in tl.static_range(SPLITS):
                inputs = (split * num_tokens + token)[:, None] * (GROUPS * RANK) + group * RANK + first + rank[None, :]
                values += tl.load(shrunk + inputs, (first < num_ranks)[:, None], 0.0)
            for base in range(first_slot, last_slot, SLOTS):
                slot = base + column // RANKS
                used = (slot < last_slot) & (tl.max((slot_of_token[:, None] == slot[None, :]).to(tl.int32), 0) > 0)
                used = tl.max_constancy(used & (first < tl.load(ranks + slot * GROUPS + group, used, 0)), RANKS)
                place = (slot.to(tl.int64) * (OUT * RANK) + first + column % RANKS)[:, None] + row[None, :] * RANK
                weights = tl.load(b + place, used[:, None] & (row < end)[None, :], 0.0)
                is_of = slot_of_token[:, None] == (base + tl.arange(0, SLOTS))[None, :]
                spread = tl.where(is_of[:, :, None], values[:, None, :], 0.0)
                total = tl.dot(tl.reshape(spread, (TOKENS, SLOTS * RANKS)).to(weights.dtype), weights, total, input_precision="ieee")
        target = out + token[:, None] * stride + row[None, :]
        tl.store(target, (floats(target, inside) + total).to(out.dtype.element_ty), inside)


class TritonLowRank:
    """See `LowRankOps`. For contiguous inputs and results with contiguous rows."""

    def add_(self, out_TN: torch.Tensor, x_TK: torch.Tensor, low_rank: LowRank, slots_T: torch.Tensor) -> None:
        num_slots, groups, rank, width = low_rank.a_SGRK.shape
        num_tokens, is_many = len(x_TK), len(x_TK) > FEW_TOKENS
        num_splits = 1 if is_many else min(MOST_SPLITS, triton.cdiv(width, SPLIT_COLUMNS))
        assert x_TK.is_contiguous() and out_TN.stride(1) == 1 and len(slots_T) == num_tokens
        tokens = LEAST_TOKENS if num_tokens <= LEAST_TOKENS else MOST_TOKENS
        tiles, part = triton.cdiv(num_tokens, tokens), triton.cdiv(triton.cdiv(width, num_splits), COLUMNS) * COLUMNS
        shrunk = torch.empty((num_splits, num_tokens, groups * rank), dtype=torch.float32, device=x_TK.device)
        common, launch = (slots_T, low_rank.ranks_SG), early_launch(x_TK)
        slots = 1 if is_many else min(EXPAND_SLOTS, triton.next_power_of_2(num_slots))
        sets = (1, 1) if is_many else (min(num_slots, SHRINK_SLOTS), triton.cdiv(num_slots, slots))
        _shrink[(tiles, num_splits * groups * (rank // RANKS.value), sets[0])](
            x_TK, low_rank.a_SGRK, *common, shrunk, num_tokens, WIDTH=width, NUM_SLOTS=num_slots,
            GROUPS=groups, RANK=rank, SPLIT_WIDTH=part, TOKENS=tokens, COLUMNS=COLUMNS, MANY=is_many, num_warps=WARPS, **launch,
        )  # fmt: skip
        _expand[(tiles, len(low_rank.blocks_B3), sets[1])](
            shrunk, low_rank.b_SNR, *common, low_rank.blocks_B3, out_TN, num_tokens, out_TN.stride(0), OUT=low_rank.b_SNR.shape[1],
            NUM_SLOTS=num_slots, SLOTS=slots, GROUPS=groups, RANK=rank, SPLITS=num_splits, TOKENS=tokens, ROWS=BLOCK_ROWS,
            ALIGNMENT=low_rank.alignment, MANY=is_many, num_warps=WARPS if tokens == LEAST_TOKENS else MANY_WARPS, **launch,
        )  # fmt: skip

    def swiglu(self, gate_up_TN: torch.Tensor) -> torch.Tensor:
        return swiglu(gate_up_TN)

    def fused(
        self, product: Product, x_TX: Activation, storage: object, low_rank: LowRank, rows: RowClass, slots_T: torch.Tensor, out: Out
    ) -> torch.Tensor | None:
        if not isinstance(storage, Plain) or (single := single_of(x_TX, rows)) is None:
            return None
        x_1X, norm = single
        is_gated = product == "swiglu"
        out_1N = x_1X.new_empty((1, len(storage.values) // (1 + is_gated))) if out is None else out
        return adapted_gemv(x_1X, storage.values, out_1N, low_rank, slots_T, norm, is_gated, adds=product == "add_to")
