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
SPLIT_COLUMNS, MOST_SPLITS = 512, 16  # of the inputs, with few tokens
FEW_TOKENS = 256  # with more, tokens of a tile have mostly one slot
SHRINK_SLOTS = 16  # most programs that share the slots of a tile with few tokens
EXPAND_SLOTS = 8  # slots of a program with few tokens
WARPS, GATED_WARPS = 4, 8
EXPAND_STAGES = 1  # its loops have one iteration mostly


class _Tiles(NamedTuple):
    tokens: int
    count: int
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
    """Program (t, (split, group), slots): A @ x over a part of the inputs."""
    group, split = tl.program_id(1) % GROUPS, tl.program_id(1) // GROUPS
    rank, end = tl.arange(0, RANKS), min(WIDTH, (split + 1) * SPLIT_WIDTH)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inputs, place = token[:, None] * WIDTH, (split * num_tokens + token)[:, None] * (GROUPS * RANK) + group * RANK + rank[None, :]
    slot_of_token = tl.load(slots + token, token < num_tokens, -1)
    first_slot, last_slot, step = tl.program_id(2), NUM_SLOTS, tl.num_programs(2)
    if MANY:
        first_slot, last_slot = _slots_between(slot_of_token, NUM_SLOTS)
    num_ranks = tl.load(ranks + first_slot * GROUPS + group, first_slot < last_slot, 0)
    await_previous_kernel(OVERLAP)
    for slot in range(first_slot, last_slot, step):
        own = slot_of_token == slot
        for first in range(0, tl.where(tl.max(own.to(tl.int32), 0) > 0, num_ranks, 0), RANKS):
            matrix = a + (slot * GROUPS + group) * (RANK * WIDTH) + (first + rank)[None, :] * WIDTH
            total = tl.zeros((TOKENS, RANKS), tl.float32)
            for start in range(split * SPLIT_WIDTH, end, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                values = tl.load(x + inputs + column[None, :], own[:, None] & (column < end)[None, :], 0.0)
                weights = tl.load(matrix + column[:, None], (column < end)[:, None], 0.0)
                total = tl.dot(values, weights, total, input_precision="ieee")
            tl.store(out + place + first, total, own[:, None])
        num_ranks = tl.load(ranks + (slot + step) * GROUPS + group, slot + step < last_slot, 0)


@triton.jit
def _sum_of_parts(
    shrunk: tensor, token: tensor, used: tensor, column: tensor, num_tokens: tensor, SIZE: constexpr, PARTS: constexpr, TOKENS: constexpr,
) -> tensor:  # fmt: skip
    """Return 16 ranks from `column` of tokens that use them, 0 for others."""
    values = tl.zeros((TOKENS, RANKS), tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_tokens + token)[:, None] * SIZE + column + tl.arange(0, RANKS)[None, :]
        values += tl.load(shrunk + place, used[:, None], 0.0)
    return values


@triton.jit
def _add_one_by_one(
    total: tensor, shrunk: tensor, b: tensor, ranks: tensor, token: tensor, slot_of_token: tensor, row: tensor, end: tensor, group: tensor,
    num_tokens: tensor, OUT: constexpr, NUM_SLOTS: constexpr, GROUPS: constexpr, RANK: constexpr, PARTS: constexpr, TOKENS: constexpr,
) -> tensor:  # fmt: skip
    """Return `total` + B @ (the sum of `shrunk`) for rows of one group, slot by slot."""
    first_slot, last_slot = _slots_between(slot_of_token, NUM_SLOTS)
    for slot in range(first_slot, last_slot):
        own = slot_of_token == slot
        num_ranks = tl.load(ranks + slot * GROUPS + group)
        for first in range(0, tl.where(tl.max(own.to(tl.int32), 0) > 0, num_ranks, 0), RANKS):
            values = _sum_of_parts(shrunk, token, own, group * RANK + first, num_tokens, GROUPS * RANK, PARTS, TOKENS)
            place = slot * (OUT * RANK) + first + tl.arange(0, RANKS)[:, None] + row[None, :] * RANK
            weights = tl.load(b + place, (row < end)[None, :], 0.0)
            total = tl.dot(values.to(weights.dtype), weights, total, input_precision="ieee")
    return total


@triton.jit
def _columns_of_b(
    b: tensor, used: tensor, first_slot: tensor, first: tensor, row: tensor, end: tensor, OUT: constexpr, SLOTS: constexpr, RANK: constexpr,
) -> tensor:  # fmt: skip
    """Return 16 ranks of each slot that uses them, 0 for others."""
    column = tl.arange(0, SLOTS * RANKS)
    used = tl.reshape(tl.broadcast_to(used.to(tl.int32)[:, None], (SLOTS, RANKS)), (SLOTS * RANKS,)) > 0
    used = tl.max_constancy(used, RANKS)
    place = ((first_slot + column // RANKS) * (OUT * RANK) + first + column % RANKS)[:, None] + row[None, :] * RANK
    return tl.load(b + place, used[:, None] & (row < end)[None, :], 0.0)


@triton.jit
def _counts_of(
    ranks: tensor, slot_of_token: tensor, first_slot: tensor, group: tensor, NUM_SLOTS: constexpr, SLOTS: constexpr, GROUPS: constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Return which slot each token has, and the ranks of slots that tokens have and of tokens, in one group."""
    slot = first_slot + tl.arange(0, SLOTS)
    counts = tl.load(ranks + slot * GROUPS + group, slot < NUM_SLOTS, 0)
    is_of = (slot_of_token[:, None] == slot[None, :]).to(tl.int32)
    return is_of, counts * tl.max(is_of, 0), tl.max(is_of * counts[None, :], 1)


@triton.jit
def _add_at_once(
    total: tensor, weights: tensor, is_of: tensor, counts: tensor, num_ranks: tensor, shrunk: tensor, b: tensor, token: tensor, row: tensor,
    end: tensor, group: tensor, first_slot: tensor, num_tokens: tensor, OUT: constexpr, SLOTS: constexpr, GROUPS: constexpr,
    RANK: constexpr, PARTS: constexpr, TOKENS: constexpr,
) -> tensor:  # fmt: skip
    """Return `total` + B @ (the sum of `shrunk`) for rows of one group. B of several slots is one matrix, `weights` for the first ranks,
    and `shrunk` of a token is 0 but for those of its slot."""
    for first in range(0, tl.max(num_ranks, 0), RANKS):
        values = _sum_of_parts(shrunk, token, first < num_ranks, group * RANK + first, num_tokens, GROUPS * RANK, PARTS, TOKENS)
        spread = tl.where((is_of > 0)[:, :, None], values.to(weights.dtype)[:, None, :], 0.0)
        spread = tl.reshape(spread, (TOKENS, SLOTS * RANKS)).to(weights.dtype)
        total = tl.dot(spread, weights, total, input_precision="ieee")
        weights = _columns_of_b(b, first + RANKS < counts, first_slot, first + RANKS, row, end, OUT, SLOTS, RANK)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    shrunk: tensor, b: tensor, slots: tensor, ranks: tensor, blocks: tensor, groups: tensor, product: tensor, out: tensor,
    num_tokens: tensor, stride: tensor, OUT: constexpr, NUM_SLOTS: constexpr, SLOTS: constexpr, GROUPS: constexpr, RANK: constexpr,
    PARTS: constexpr, TOKENS: constexpr, ROWS: constexpr, ALIGNMENT: constexpr, GATED: constexpr, MANY: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (t, block, slots): out = product + B @ (the sum of `shrunk`) for rows of one group and tokens with an adapter. If GATED,
    silu(g) * u of the halves g and u of that, for all tokens."""
    begin = tl.multiple_of(tl.load(blocks + tl.program_id(1) * 3), ALIGNMENT)
    end = tl.multiple_of(tl.load(blocks + tl.program_id(1) * 3 + 1), ALIGNMENT)
    group = tl.load(blocks + tl.program_id(1) * 3 + 2)
    row, token = begin + tl.arange(0, ROWS), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot_of_token = tl.load(slots + token, token < num_tokens, -1)
    if MANY:
        is_own = (slot_of_token >= (-1 if GATED else 0)) & (token < num_tokens)
        await_previous_kernel(OVERLAP)
    else:
        first_slot = tl.program_id(2) * SLOTS
        is_own = (slot_of_token >= first_slot) & (slot_of_token < first_slot + SLOTS)
        is_of, counts, num_ranks = _counts_of(ranks, slot_of_token, first_slot, group, NUM_SLOTS, SLOTS, GROUPS)
        weights = _columns_of_b(b, counts > 0, first_slot, 0, row, end, OUT, SLOTS, RANK)
        if GATED:
            is_own |= (slot_of_token < tl.where(tl.program_id(2) == 0, 0, -1)) & (token < num_tokens)
            group_up = tl.load(groups + begin + OUT // 2)
            is_of_up, counts_up, num_ranks_up = _counts_of(ranks, slot_of_token, first_slot, group_up, NUM_SLOTS, SLOTS, GROUPS)
            weights_up = _columns_of_b(b, counts_up > 0, first_slot, 0, row + OUT // 2, end + OUT // 2, OUT, SLOTS, RANK)
        await_previous_kernel(OVERLAP)
    if tl.max(is_own.to(tl.int32), 0) > 0:
        inside, place = is_own[:, None] & (row < end)[None, :], token[:, None] * stride + row[None, :]
        total = floats(product + place, inside)
        if MANY:
            total = _add_one_by_one(
                total, shrunk, b, ranks, token, slot_of_token, row, end, group, num_tokens, OUT, NUM_SLOTS, GROUPS, RANK, PARTS, TOKENS,
            )  # fmt: skip
        else:
            total = _add_at_once(
                total, weights, is_of, counts, num_ranks, shrunk, b, token, row, end, group, first_slot, num_tokens, OUT, SLOTS, GROUPS,
                RANK, PARTS, TOKENS,
            )  # fmt: skip
        if GATED:
            up, row_up, end_up = floats(product + OUT // 2 + place, inside), row + OUT // 2, end + OUT // 2
            if MANY:
                up = _add_one_by_one(
                    up, shrunk, b, ranks, token, slot_of_token, row_up, end_up, tl.load(groups + begin + OUT // 2), num_tokens, OUT,
                    NUM_SLOTS, GROUPS, RANK, PARTS, TOKENS,
                )  # fmt: skip
            else:
                up = _add_at_once(
                    up, weights_up, is_of_up, counts_up, num_ranks_up, shrunk, b, token, row_up, end_up, group_up, first_slot, num_tokens,
                    OUT, SLOTS, GROUPS, RANK, PARTS, TOKENS,
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
        shrunk_STR = torch.empty((splits, num_tokens, groups * rank), dtype=torch.float32, device=x_TK.device)
        _shrink[(tiles.count, splits * groups, tiles.shrink_sets)](
            x_TK, low_rank.a_SGRK, slots_T, low_rank.ranks_SG, shrunk_STR, num_tokens, WIDTH=width, NUM_SLOTS=num_slots, GROUPS=groups,
            RANK=rank, SPLIT_WIDTH=triton.cdiv(triton.cdiv(width, splits), COLUMNS) * COLUMNS, TOKENS=tiles.tokens, COLUMNS=COLUMNS,
            MANY=tiles.is_many, num_warps=WARPS, **early_launch(x_TK),
        )  # fmt: skip
        return shrunk_STR

    def expand_(self, out_TN: torch.Tensor, shrunk: torch.Tensor, low_rank: LowRank, slots_T: torch.Tensor) -> None:
        _launch_expand(shrunk, low_rank, slots_T, out_TN, out_TN, False)

    def expand_swiglu(self, gate_up_TN: torch.Tensor, shrunk: torch.Tensor, low_rank: LowRank, slots_T: torch.Tensor) -> torch.Tensor:
        out_TI = gate_up_TN.new_empty((len(gate_up_TN), gate_up_TN.shape[1] // 2))
        _launch_expand(shrunk, low_rank, slots_T, gate_up_TN, out_TI, True)
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
    _expand[(tiles.count, len(low_rank.blocks_B3) // (1 + is_gated), 1 if tiles.is_many else triton.cdiv(num_slots, tiles.slots))](
        shrunk_PTR, low_rank.b_SNR, slots_T, low_rank.ranks_SG, low_rank.blocks_B3, low_rank.groups_N, product_TN, out_TX, len(product_TN),
        product_TN.stride(0), OUT=low_rank.b_SNR.shape[1], NUM_SLOTS=num_slots, SLOTS=tiles.slots, GROUPS=groups, RANK=rank,
        PARTS=len(shrunk_PTR), TOKENS=tiles.tokens, ROWS=BLOCK_ROWS, ALIGNMENT=low_rank.alignment, GATED=is_gated, MANY=tiles.is_many,
        num_warps=GATED_WARPS if is_gated else WARPS, num_stages=EXPAND_STAGES, **early_launch(product_TN),
    )  # fmt: skip
