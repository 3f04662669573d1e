"""Triton kernels of a mixture's router. With atomic counters, choices of few tokens are listed by expert, those of many are sorted into
tiles; the order within an expert varies without effect on any row. Choices: see `moe`."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.compiling import THIS_THREAD
from models.kernels.ops import Experts
from models.kernels.triton.launch import await_kernel, await_previous_kernel, cdiv, floats, kernel, power_of_2

SORTED, SORTED_BLOCKS = 128, 4  # choices, and about so many blocks, per sorting program
ROUTE_WARPS, SORT_WARPS = 1, 4
SORTED_BY_WARP = 64  # maximum experts that a warp compares with choices
MOST_LISTED = 64  # tokens


@triton.jit
def _in_order(bits: tensor, BITS: constexpr) -> tensor:
    """Map the bits of floats to integers in the same order, and back."""
    return tl.where(bits < 0, bits ^ ((1 << (BITS - 1)) - 1), bits)


@triton.jit
def _logits(place: tensor, mask: tensor, part_size: tensor, PARTS: constexpr) -> tensor:
    """Add partial sums."""
    total = floats(place, mask)
    for part in tl.static_range(1, PARTS):
        total += floats(place + part * part_size, mask)
    return total


@triton.jit
def _best(
    logits: tensor, weights: tensor, part_size: tensor, PARTS: constexpr, EXPERTS: constexpr, BLOCK: constexpr, CHOSEN: constexpr,
    CHOICES: constexpr, BITS: constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Return (CHOICES,) experts with a token's largest logits, of BITS bits, and their softmax. A logit and its expert form one integer, so
    ties go to the first expert."""
    LOW: tl.constexpr = (1 << BITS) - 1
    LEAST: tl.constexpr = -(1 << (2 * BITS - 1))
    expert, choice = tl.arange(0, BLOCK), tl.arange(0, CHOICES)
    logit = _logits(logits + expert, expert < EXPERTS, part_size, PARTS).to(weights.dtype.element_ty)
    bits = logit.to(tl.int16, bitcast=True).to(tl.int32) if BITS == 16 else logit.to(tl.int32, bitcast=True).to(tl.int64)
    key = tl.where(expert < EXPERTS, (_in_order(bits, BITS) << BITS) | (LOW - expert.to(bits.dtype)), LEAST)
    found = tl.full((CHOICES,), LEAST, key.dtype)
    for k in tl.static_range(CHOSEN):
        largest = tl.max(key, 0)
        found, key = tl.where(choice == k, largest, found), tl.where(key == largest, LEAST, key)
    bits = _in_order(found >> BITS, BITS)
    logit = bits.to(tl.int16 if BITS == 16 else tl.int32).to(weights.dtype.element_ty, bitcast=True).to(tl.float32)
    logit = tl.where(choice < CHOSEN, logit, -float("inf"))
    weight = tl.exp(logit - tl.max(logit, 0))
    return (LOW - (found & LOW)).to(tl.int32), weight / tl.sum(weight, 0)


@kernel(do_not_specialize=["part_size"])
def _route(
    logits: tensor, is_real: tensor, chosen: tensor, weights: tensor, ranks: tensor, counts: tensor, listed: tensor, parts: tensor,
    first: tensor, num_experts: tensor, part_size: tensor, PARTS: constexpr, LOGITS: constexpr, PADDED: constexpr, COUNTED: constexpr,
    LISTED: constexpr, EXPERTS: constexpr, BLOCK: constexpr, CHOSEN: constexpr, GIVEN: constexpr, CHOICES: constexpr, BITS: constexpr,
    WIDTH: constexpr, STRIPE: constexpr, ZEROED: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: the experts of one token, CHOSEN by the router and GIVEN including the shared one, relative to expert `first`, or -1 on
    other ranks: ZEROED zeroes these parts. If COUNTED, each gets a rank among its expert's choices, and a place in LISTED of the expert."""
    token, choice = tl.program_id(0).to(tl.int64), tl.arange(0, CHOICES)
    await_previous_kernel(OVERLAP)
    logits += token * LOGITS
    best, weight = _best(logits, weights, part_size, PARTS, EXPERTS, BLOCK, CHOSEN, CHOICES, BITS)
    if GIVEN > CHOSEN:
        shared = _logits(logits + EXPERTS, True, part_size, PARTS).to(weights.dtype.element_ty).to(tl.float32)
        best = tl.where(choice == CHOSEN, EXPERTS, best)
        weight = tl.where(choice == CHOSEN, 1 / (1 + tl.exp(-shared)), weight)
    mine = (best >= first) & (best < first + num_experts)
    if PADDED:
        mine = mine & (tl.load(is_real + token) != 0)
    best = tl.where(mine, best - first, -1)
    mine = best >= 0
    index, inside = token * GIVEN + choice, choice < GIVEN
    tl.store(chosen + index, best, inside)
    tl.store(weights + index, weight.to(weights.dtype.element_ty), inside)
    if COUNTED:
        rank = tl.atomic_add(counts + best, 1, mine)
        tl.store(ranks + index, rank, mine)
        if LISTED:
            tl.store(listed + best * LISTED + rank, index, mine)
    if ZEROED and tl.sum(mine.to(tl.int32), 0) < GIVEN:
        for k in tl.static_range(GIVEN):
            if tl.sum(tl.where(choice == k, mine.to(tl.int32), 0), 0) == 0:
                place = (k * tl.num_programs(0) + token) * WIDTH
                for start in range(0, WIDTH, STRIPE):
                    column = start + tl.arange(0, STRIPE)
                    tl.store(parts + place + column, tl.zeros((STRIPE,), parts.dtype.element_ty), column < WIDTH)


@kernel(do_not_specialize=["num_choices", "num_blocks"])
def _sort(
    chosen: tensor, ranks: tensor, counts: tensor, choices: tensor, experts: tensor, rows: tensor, end_of_all: tensor, num_choices: tensor,
    num_blocks: tensor, EXPERTS: constexpr, BLOCK: constexpr, ROWS: constexpr, FILLED: constexpr, SORTED: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: sort SORTED choices, with each expert's starting at a multiple of ROWS, and write expert and rows of some blocks. With
    FILLED, a power of two, the other places of a block are set to `num_choices`."""
    expert = tl.arange(0, BLOCK)
    choice = tl.program_id(0) * SORTED + tl.arange(0, SORTED)
    await_kernel(OVERLAP)
    count = tl.load(counts + expert, expert < EXPERTS, 0)
    padded = (count + ROWS - 1) // ROWS * ROWS
    end = tl.cumsum(padded, 0)
    start = end - padded
    mine = tl.load(chosen + choice, choice < num_choices, -1)
    first = tl.sum(tl.where(mine[:, None] == expert[None, :], start[None, :], 0), 1)
    tl.store(choices + first + tl.load(ranks + choice, mine >= 0, 0), choice, mine >= 0)
    if tl.program_id(0) == 0:
        tl.store(end_of_all, tl.sum(padded, 0))
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        index = tl.sum((end <= block * ROWS).to(tl.int32), 0)
        left = tl.sum(tl.where(expert == index, start + count - block * ROWS, 0), 0)
        tl.store(experts + block, index)
        tl.store(rows + block, left)
        if FILLED:
            row = tl.arange(0, FILLED)
            tl.store(choices + block * ROWS + row, num_choices, (row >= left) & (row < ROWS))


@dataclass(frozen=True, slots=True)
class Choices:
    """The experts of each token, (T, K): int32, counted from this rank's first, or -1; and the router's weights."""

    experts_TK: torch.Tensor
    weights_TK: torch.Tensor
    num_experts: int
    ranks_TK: torch.Tensor  # int32, among the choices of the same expert, if they are counted
    counts_E: torch.Tensor | None = None  # int32, choices of each expert
    listed_EM: torch.Tensor | None = None  # int32, choices of each expert by rank, for up to M = MOST_LISTED tokens


@dataclass(frozen=True, slots=True)
class SortedChoices:
    """Choices sorted by expert, each expert's starting at a multiple of `rows`: a block is `rows` of them. int32. More blocks than there
    are have an invalid expert."""

    rows: int
    choices: torch.Tensor  # (B * rows,); invalid after a block's choices, or T * K if filled
    experts_B: torch.Tensor
    rows_B: torch.Tensor  # number of choices from the block's first on, at most 0 after the last one
    end_1: torch.Tensor  # places up to the last block's end


def route(
    logits_STE: torch.Tensor, experts: Experts, valid_T: torch.Tensor | None, parts_KTD: torch.Tensor | None = None,
    counts_E: torch.Tensor | None = None,
) -> Choices:  # fmt: skip
    """Return the router's choices from its logits: float32 partial sums of bfloat16 ones if S > 1. They are counted in `counts_E`, zeros if
    given; parts not written by this rank's experts are zeroed."""
    (num_parts, num_tokens, num_logits), given = logits_STE.shape, experts.num_given
    assert logits_STE.is_contiguous() and (parts_KTD is None or parts_KTD.is_contiguous())
    experts_TK, ranks_TK = (logits_STE.new_empty((num_tokens, given), dtype=torch.int32) for _ in range(2))
    is_listed = counts_E is not None and num_tokens <= MOST_LISTED
    listed_EM = experts_TK.new_empty((experts.count, MOST_LISTED)) if is_listed else None
    if THIS_THREAD.compiler is not None:
        experts_TK.zero_()  # CUDA kernels read them as addresses
    weights_TK = logits_STE.new_empty((num_tokens, given), dtype=logits_STE.dtype if num_parts == 1 else torch.bfloat16)
    _route[(num_tokens,)](
        logits_STE, logits_STE if valid_T is None else valid_T, experts_TK, weights_TK, ranks_TK,
        ranks_TK if counts_E is None else counts_E, ranks_TK if listed_EM is None else listed_EM,
        weights_TK if parts_KTD is None else parts_KTD, experts.first, experts.count, num_tokens * num_logits,
        PARTS=num_parts, LOGITS=num_logits, PADDED=valid_T is not None, COUNTED=counts_E is not None,
        LISTED=MOST_LISTED if is_listed else 0, ZEROED=parts_KTD is not None, EXPERTS=experts.num_experts,
        BLOCK=power_of_2(experts.num_experts), CHOSEN=experts.num_chosen, GIVEN=given, CHOICES=power_of_2(given),
        BITS=8 * weights_TK.itemsize, WIDTH=0 if parts_KTD is None else parts_KTD.shape[2], STRIPE=1024, num_warps=ROUTE_WARPS,
    )  # fmt: skip
    return Choices(experts_TK, weights_TK, experts.count, ranks_TK, counts_E, listed_EM)


def sort(choices: Choices, rows: int, is_filled: bool = False) -> SortedChoices:
    """Sort counted choices into blocks of `rows`."""
    experts_TK, ranks_TK, counts_E = choices.experts_TK, choices.ranks_TK, choices.counts_E
    assert counts_E is not None
    num_choices = experts_TK.numel()
    num_blocks = cdiv(num_choices, rows) + choices.num_experts  # upper bound: each expert may have one partial block
    sizes = num_blocks * rows, num_blocks, num_blocks, 1  # each aligned: Triton compiles a kernel for each alignment
    sorted_choices, *lists = (experts_TK.new_empty(size) for size in sizes)
    made = SortedChoices(rows, sorted_choices, *lists)
    block = power_of_2(choices.num_experts)
    _sort[(max(cdiv(num_choices, SORTED), cdiv(num_blocks, SORTED_BLOCKS)),)](
        experts_TK, ranks_TK, counts_E, made.choices, made.experts_B, made.rows_B, made.end_1, num_choices, num_blocks,
        EXPERTS=choices.num_experts, BLOCK=block, ROWS=rows, FILLED=power_of_2(rows) if is_filled else 0, SORTED=SORTED,
        num_warps=max(SORT_WARPS, block // SORTED_BY_WARP),
    )  # fmt: skip
    return made
