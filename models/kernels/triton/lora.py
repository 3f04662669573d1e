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
FEW_TOKENS = 256
SHRINK_SLOTS, EXPAND_SLOTS = 16, 2  # most programs that share the slots of a tile; expanding has many more tiles
WARPS, MANY_WARPS = 4, 8  # many: of the larger tile when expanding
EXPAND_STAGES = 2


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    x: tensor, a: tensor, slots: tensor, ranks: tensor, out: tensor, num_tokens: tensor, WIDTH: constexpr, NUM_SLOTS: constexpr,
    TURNS: constexpr, GROUPS: constexpr, RANK: constexpr, SPLIT_WIDTH: constexpr, TOKENS: constexpr, COLUMNS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (t, (split, group, ranks), slots): A @ x over a part of the inputs."""
    first = tl.program_id(1) % (RANK // RANKS) * RANKS
    group = tl.program_id(1) // (RANK // RANKS) % GROUPS
    split = tl.program_id(1) // (RANK // RANKS * GROUPS)
    row, end = first + tl.arange(0, RANKS), min(WIDTH, (split + 1) * SPLIT_WIDTH)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inputs, place = token[:, None] * WIDTH, (split * num_tokens + token)[:, None] * (GROUPS * RANK) + group * RANK + row[None, :]
    await_previous_kernel(OVERLAP)
    slot_of_token = tl.load(slots + token, token < num_tokens, -1)
    for turn in range(TURNS):
        slot = tl.program_id(2) + turn * tl.num_programs(2)
        own, num_ranks = slot_of_token == slot, tl.load(ranks + slot * GROUPS + group, slot < NUM_SLOTS, 0)
        if (first < num_ranks) & (tl.max(own.to(tl.int32), 0) > 0):
            matrix = a + (slot * GROUPS + group).to(tl.int64) * RANK * WIDTH + row[None, :] * WIDTH
            total = tl.zeros((TOKENS, RANKS), tl.float32)
            for start in range(split * SPLIT_WIDTH, end, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                values = tl.load(x + inputs + column[None, :], own[:, None] & (column < end)[None, :], 0.0)
                weights = tl.load(matrix + column[:, None], (column < end)[:, None], 0.0)
                total = tl.dot(values, weights, total, input_precision="ieee")
            tl.store(out + place, total, own[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    shrunk: tensor, b: tensor, slots: tensor, ranks: tensor, blocks: tensor, out: tensor, num_tokens: tensor, stride: tensor,
    OUT: constexpr, NUM_SLOTS: constexpr, TURNS: constexpr, GROUPS: constexpr, RANK: constexpr, SPLITS: constexpr, TOKENS: constexpr,
    ROWS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (t, block, slots): out += B @ (the sum of `shrunk`) for rows of one group."""
    begin, end = tl.load(blocks + tl.program_id(1) * 3), tl.load(blocks + tl.program_id(1) * 3 + 1)
    group = tl.load(blocks + tl.program_id(1) * 3 + 2)
    row, rank = begin + tl.arange(0, ROWS), tl.arange(0, RANKS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inputs, place = token[:, None] * (GROUPS * RANK) + group * RANK + rank[None, :], token[:, None] * stride + row[None, :]
    await_previous_kernel(OVERLAP)
    slot_of_token = tl.load(slots + token, token < num_tokens, -1)
    for turn in range(TURNS):
        slot = tl.program_id(2) + turn * tl.num_programs(2)
        own, num_ranks = slot_of_token == slot, tl.load(ranks + slot * GROUPS + group, slot < NUM_SLOTS, 0)
        if (num_ranks > 0) & (tl.max(own.to(tl.int32), 0) > 0):
            matrix = b + slot.to(tl.int64) * OUT * RANK + row[None, :] * RANK + rank[:, None]
            total = tl.zeros((TOKENS, ROWS), tl.float32)
            for first in range(0, num_ranks, RANKS):
                values = tl.zeros((TOKENS, RANKS), tl.float32)
                for split in tl.static_range(SPLITS):
                    values += tl.load(shrunk + inputs + split * num_tokens * (GROUPS * RANK) + first, own[:, None], 0.0)
                weights = tl.load(matrix + first, (row < end)[None, :], 0.0)
                total = tl.dot(values.to(weights.dtype), weights, total, input_precision="ieee")
            inside = own[:, None] & (row < end)[None, :]
            tl.store(out + place, (floats(out + place, inside) + total).to(out.dtype.element_ty), inside)


class TritonLowRank:
    """See `LowRankOps`. For contiguous inputs and results with contiguous rows."""

    def add_(self, out_TN: torch.Tensor, x_TK: torch.Tensor, low_rank: LowRank, slots_T: torch.Tensor) -> None:
        num_slots, groups, rank, width = low_rank.a_SGRK.shape
        num_tokens, num_splits = len(x_TK), min(MOST_SPLITS, triton.cdiv(width, SPLIT_COLUMNS)) if len(x_TK) <= FEW_TOKENS else 1
        assert x_TK.is_contiguous() and out_TN.stride(1) == 1 and len(slots_T) == num_tokens
        tokens = LEAST_TOKENS if num_tokens <= LEAST_TOKENS else MOST_TOKENS
        tiles, part = triton.cdiv(num_tokens, tokens), triton.cdiv(triton.cdiv(width, num_splits), COLUMNS) * COLUMNS
        shrunk = torch.empty((num_splits, num_tokens, groups * rank), dtype=torch.float32, device=x_TK.device)
        common, launch = (slots_T, low_rank.ranks_SG), early_launch(x_TK)
        shrinks, expands = min(num_slots, SHRINK_SLOTS), min(num_slots, EXPAND_SLOTS)
        _shrink[(tiles, num_splits * groups * (rank // RANKS.value), shrinks)](
            x_TK, low_rank.a_SGRK, *common, shrunk, num_tokens, WIDTH=width, NUM_SLOTS=num_slots, TURNS=triton.cdiv(num_slots, shrinks),
            GROUPS=groups, RANK=rank, SPLIT_WIDTH=part, TOKENS=tokens, COLUMNS=COLUMNS,
            num_warps=WARPS, **launch,
        )  # fmt: skip
        _expand[(tiles, len(low_rank.blocks_B3), expands)](
            shrunk, low_rank.b_SNR, *common, low_rank.blocks_B3, out_TN, num_tokens, out_TN.stride(0), OUT=low_rank.b_SNR.shape[1],
            NUM_SLOTS=num_slots, TURNS=triton.cdiv(num_slots, expands), GROUPS=groups, RANK=rank, SPLITS=num_splits, TOKENS=tokens,
            ROWS=BLOCK_ROWS, num_warps=WARPS if tokens == LEAST_TOKENS else MANY_WARPS, num_stages=EXPAND_STAGES, **launch,
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
