"""Low-rank products of adapters: shrink and expand, for prompts and decode rows alike.

A program has a tile of tokens and every n-th slot, and skips slots that none of its tokens has. So tokens need not be sorted, and grids
depend on shapes alone, as CUDA graphs require.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.stream import Activation, RowClass
from models.kernels.triton.activations import single_of
from models.kernels.triton.launch import await_previous_kernel, early_launch, floats
from models.kernels.triton.lora_single import adapted_gemv
from models.lora.low_rank import BLOCK_ROWS, LowRank, Out, Product
from models.weights.plain import Plain

RANKS = tl.constexpr(16)  # rank of a tile, see `RANK_STEP`
LEAST_TOKENS, MOST_TOKENS = 16, 64  # of a tile
MOST_VALUES = 1 << 31  # of the matrices, whose offsets are int32
COLUMNS = 128  # inputs of one product of tiles
SPLIT_COLUMNS, MOST_SPLITS = 1024, 8  # of the inputs, with few tokens
FEW_TOKENS = 1024  # with more, tokens of a tile have mostly one slot, and tiles are enough to fill the device
SHRINK_SLOTS = 16  # most programs that share the slots of a tile with few tokens
EXPAND_SLOTS = 4  # slots of a program with few tokens
WARPS, GATED_WARPS = 4, 8  # gated: with many tokens


class _Tiles(NamedTuple):
    tokens: int
    num_tiles: int
    is_many: bool
    shrink_sets: int  # programs that share the slots of a tile
    slots: int  # of a program when expanding


def _tiles_of(num_tokens: int, num_slots: int) -> _Tiles:
    tokens, is_many = LEAST_TOKENS if num_tokens <= LEAST_TOKENS else MOST_TOKENS, num_tokens > FEW_TOKENS
    slots = 1 if is_many else min(EXPAND_SLOTS, triton.next_power_of_2(num_slots))
    return _Tiles(tokens, triton.cdiv(num_tokens, tokens), is_many, 1 if is_many else min(num_slots, SHRINK_SLOTS), slots)


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
            matrix = a + (slot * GROUPS + group) * (RANK * WIDTH) + row[None, :] * WIDTH
            total = tl.zeros((TOKENS, RANKS), tl.float32)
            for start in range(split * SPLIT_WIDTH, end, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                values = tl.load(x + inputs + column[None, :], own[:, None] & (column < end)[None, :], 0.0)
                weights = tl.load(matrix + column[:, None], (column < end)[:, None], 0.0)
                total = tl.dot(values, weights, total, input_precision="ieee")
            tl.store(out + place, total, own[:, None])
        num_ranks = tl.load(ranks + (slot + step) * GROUPS + group, slot + step < last_slot, 0)


@triton.jit
def _plus_low_rank(
    total: tensor, shrunk: tensor, b: tensor, ranks: tensor, token: tensor, slot_of_token: tensor, is_own: tensor, row: tensor, end: tensor,
    group: tensor, first_slot: tensor, last_slot: tensor, num_tokens: tensor, OUT: constexpr, SLOTS: constexpr, GROUPS: constexpr,
    RANK: constexpr, SPLITS: constexpr, TOKENS: constexpr,
) -> tensor:  # fmt: skip
    """Return `total` + B @ (the sum of `shrunk`) for rows of one group. B of several slots is one matrix with their ranks as columns, and
    `shrunk` of a token is 0 but for those of its slot."""
    rank, column = tl.arange(0, RANKS), tl.arange(0, SLOTS * RANKS)
    num_ranks = tl.load(ranks + slot_of_token * GROUPS + group, is_own & (slot_of_token >= 0), 0)
    for first in range(0, tl.max(num_ranks, 0), RANKS):
        values = tl.zeros((TOKENS, RANKS), tl.float32)
        for split in tl.static_range(SPLITS):
            inputs = (split * num_tokens + token)[:, None] * (GROUPS * RANK) + group * RANK + first + rank[None, :]
            values += tl.load(shrunk + inputs, (first < num_ranks)[:, None], 0.0)
        factors = values.to(b.dtype.element_ty)
        for base in range(first_slot, last_slot, SLOTS):
            slot = base + tl.arange(0, SLOTS)
            is_of = slot_of_token[:, None] == slot[None, :]
            present = (slot < last_slot) & (tl.max(is_of.to(tl.int32), 0) > 0)
            used = (first < tl.load(ranks + slot * GROUPS + group, present, 0)).to(tl.int32)
            used = tl.max_constancy(tl.reshape(tl.broadcast_to(used[:, None], (SLOTS, RANKS)), (SLOTS * RANKS,)) > 0, RANKS)
            place = ((base + column // RANKS) * (OUT * RANK) + first + column % RANKS)[:, None] + row[None, :] * RANK
            weights = tl.load(b + place, used[:, None] & (row < end)[None, :], 0.0)
            spread = tl.reshape(tl.where(is_of[:, :, None], factors[:, None, :], 0.0), (TOKENS, SLOTS * RANKS))
            total = tl.dot(spread.to(weights.dtype), weights, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    shrunk: tensor, b: tensor, slots: tensor, ranks: tensor, blocks: tensor, groups: tensor, product: tensor, out: tensor,
    num_tokens: tensor, stride: tensor, OUT: constexpr, NUM_SLOTS: constexpr, SLOTS: constexpr, GROUPS: constexpr, RANK: constexpr,
    SPLITS: constexpr, TOKENS: constexpr, ROWS: constexpr, ALIGNMENT: constexpr, GATED: constexpr, MANY: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (t, block, slots): out = product + B @ (the sum of `shrunk`) for rows of one group and tokens with an adapter. If GATED,
    silu(g) * u of the halves g and u of that, for all tokens."""
    begin = tl.multiple_of(tl.load(blocks + tl.program_id(1) * 3), ALIGNMENT)
    end = tl.multiple_of(tl.load(blocks + tl.program_id(1) * 3 + 1), ALIGNMENT)
    group = tl.load(blocks + tl.program_id(1) * 3 + 2)
    row, token = begin + tl.arange(0, ROWS), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot_of_token = tl.load(slots + token, token < num_tokens, -1)
    first_slot, last_slot = tl.program_id(2) * SLOTS, min(NUM_SLOTS, (tl.program_id(2) + 1) * SLOTS)
    is_own = (slot_of_token >= first_slot) & (slot_of_token < last_slot)
    if GATED:
        is_own |= (slot_of_token < tl.where(tl.program_id(2) == 0, 0, -1)) & (token < num_tokens)
    if MANY:
        first_slot, last_slot = _slots_between(slot_of_token, NUM_SLOTS)
        is_own = (slot_of_token >= (-1 if GATED else 0)) & (token < num_tokens)
    await_previous_kernel(OVERLAP)
    if tl.max(is_own.to(tl.int32), 0) > 0:
        inside, place = is_own[:, None] & (row < end)[None, :], token[:, None] * stride + row[None, :]
        total = floats(product + place, inside)
        total = _plus_low_rank(
            total, shrunk, b, ranks, token, slot_of_token, is_own, row, end, group, first_slot, last_slot, num_tokens, OUT, SLOTS, GROUPS,
            RANK, SPLITS, TOKENS,
        )  # fmt: skip
        if GATED:
            up = floats(product + OUT // 2 + place, inside)
            up = _plus_low_rank(
                up, shrunk, b, ranks, token, slot_of_token, is_own, row + OUT // 2, end + OUT // 2, tl.load(groups + begin + OUT // 2),
                first_slot, last_slot, num_tokens, OUT, SLOTS, GROUPS, RANK, SPLITS, TOKENS,
            )  # fmt: skip
            total = total / (1 + tl.exp(-total)) * up
            place = token[:, None] * (OUT // 2) + row[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), inside)


class TritonLowRank:
    """See `LowRankOps`. For contiguous inputs and results with contiguous rows."""

    def shrink(self, x_TK: torch.Tensor, low_rank: LowRank, slots_T: torch.Tensor) -> torch.Tensor:
        num_slots, groups, rank, width = low_rank.a_SGRK.shape
        num_tokens, tiles = len(x_TK), _tiles_of(len(x_TK), num_slots)
        splits = 1 if tiles.is_many else min(MOST_SPLITS, triton.cdiv(width, SPLIT_COLUMNS))
        assert x_TK.is_contiguous() and len(slots_T) == num_tokens and low_rank.a_SGRK.numel() < MOST_VALUES
        shrunk_PTR = torch.empty((splits, num_tokens, groups * rank), dtype=torch.float32, device=x_TK.device)
        _shrink[(tiles.num_tiles, splits * groups * (rank // RANKS.value), tiles.shrink_sets)](
            x_TK, low_rank.a_SGRK, slots_T, low_rank.ranks_SG, shrunk_PTR, num_tokens, WIDTH=width, NUM_SLOTS=num_slots, GROUPS=groups,
            RANK=rank, SPLIT_WIDTH=triton.cdiv(triton.cdiv(width, splits), COLUMNS) * COLUMNS, TOKENS=tiles.tokens, COLUMNS=COLUMNS,
            MANY=tiles.is_many, num_warps=WARPS, **early_launch(x_TK),
        )  # fmt: skip
        return shrunk_PTR

    def expand_(self, out_TN: torch.Tensor, shrunk_PTR: torch.Tensor, low_rank: LowRank, slots_T: torch.Tensor) -> None:
        _launch_expand(shrunk_PTR, low_rank, slots_T, out_TN, out_TN, False)

    def expand_swiglu(self, gate_up_TN: torch.Tensor, shrunk_PTR: torch.Tensor, low_rank: LowRank, slots_T: torch.Tensor) -> torch.Tensor:
        out_TI = gate_up_TN.new_empty((len(gate_up_TN), gate_up_TN.shape[1] // 2))
        _launch_expand(shrunk_PTR, low_rank, slots_T, gate_up_TN, out_TI, True)
        return out_TI

    def fused(
        self, product: Product, x_TX: Activation, storage: object, low_rank: LowRank, rows: RowClass, slots_T: torch.Tensor, out: Out
    ) -> torch.Tensor | None:
        if not isinstance(storage, Plain) or (single := single_of(x_TX, rows)) is None:
            return None
        x_1X, norm = single
        is_gated = product == "swiglu"
        out_1N = x_1X.new_empty((1, len(storage.values) // (1 + is_gated))) if out is None else out
        return adapted_gemv(x_1X, storage.values, out_1N, low_rank, slots_T, norm, is_gated, adds=product == "add_to")


def _launch_expand(
    shrunk_PTR: torch.Tensor, low_rank: LowRank, slots_T: torch.Tensor, product_TN: torch.Tensor, out_TX: torch.Tensor, is_gated: bool
) -> None:
    num_slots, groups, rank, _ = low_rank.a_SGRK.shape
    tiles = _tiles_of(len(product_TN), num_slots)
    assert product_TN.stride(1) == 1 and low_rank.b_SNR.numel() < MOST_VALUES
    _expand[(tiles.num_tiles, len(low_rank.blocks_B3) // (1 + is_gated), 1 if tiles.is_many else triton.cdiv(num_slots, tiles.slots))](
        shrunk_PTR, low_rank.b_SNR, slots_T, low_rank.ranks_SG, low_rank.blocks_B3, low_rank.groups_N, product_TN, out_TX, len(product_TN),
        product_TN.stride(0), OUT=low_rank.b_SNR.shape[1], NUM_SLOTS=num_slots, SLOTS=tiles.slots, GROUPS=groups, RANK=rank,
        SPLITS=len(shrunk_PTR), TOKENS=tiles.tokens, ROWS=BLOCK_ROWS, ALIGNMENT=low_rank.alignment, GATED=is_gated, MANY=tiles.is_many,
        num_warps=GATED_WARPS if is_gated and tiles.is_many else WARPS, **early_launch(product_TN),
    )  # fmt: skip
