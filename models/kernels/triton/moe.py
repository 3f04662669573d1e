"""Triton kernels of a mixture of SwiGLU experts that `routing` chose. Choice token * CHOSEN + k is the token's k-th best expert,
or after these the shared one.

Choices are listed by expert or sorted, see `routing`. The host is not involved.
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.ops import Experts
from models.kernels.triton.activations import rounded
from models.kernels.triton.launch import await_kernel, await_previous_kernel, capability_of, cdiv, floats, kernel
from models.kernels.triton.routing import MOST_LISTED, Choices, SortedChoices, route, sort
from models.kernels.triton.tuned import ExpertTiles, expert_tiles
from models.weights.float8 import BlockScaled, GroupScaled
from models.weights.plain import Plain

SUM_COLUMNS, SUM_WARPS = 1024, 4  # per program of `_weighted_sum`
TURNED_ROWS = 64  # with fewer rows, untransposed float8 products would use a wider type


@triton.jit
def _multiply(
    x: tensor, x_scales: tensor, matrices: tensor, scales: tensor, weights: tensor, out: tensor, expert: tensor, choice: tensor,
    inside: tensor, tile: tensor, num_tokens: tensor, scale_stride: tensor, GATED: constexpr, SCALED: constexpr, TURNED: constexpr,
    CHOSEN: constexpr, WIDTH: constexpr, OUT: constexpr, SCALES: constexpr, ROWS: constexpr, COLUMNS: constexpr, DEPTH: constexpr,
    STAGES: constexpr,
) -> None:  # fmt: skip
    """Multiply ROWS choices of an expert by COLUMNS of its OUT rows of WIDTH values; columns of a projection share a block of scales.

    GATED: inputs are tokens, rows alternate between gate and up projections, and the SwiGLU of each choice is stored. Otherwise inputs are
    these values, and results times the router's weights are partial sums of tokens. TURNED: ROWS are columns of the MMA.
    """
    PARTS: tl.constexpr = max(DEPTH // 128, 1) if SCALED else 1  # groups with a scale
    column, depth = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH // PARTS)
    source, row, first = choice, column, tile * COLUMNS
    if GATED:
        source, row, first = choice // CHOSEN, column % 2 * (OUT // 2) + column // 2, tile * (COLUMNS // 2)
    inputs = x + source.to(tl.int64)[:, None] * WIDTH + depth[None, :]
    factors = matrices + (expert.to(tl.int64) * OUT + row)[None, :] * WIDTH + depth[:, None]
    block = scales + (expert * (OUT // 128) + first // 128) * SCALES
    total = tl.zeros((COLUMNS, ROWS) if TURNED else (ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, WIDTH // DEPTH, num_stages=STAGES):
        for part in tl.static_range(PARTS):
            start = step * DEPTH + part * (DEPTH // PARTS)
            factor = tl.load(factors + start)  # first: independent of the choices
            values = tl.load(inputs + start, inside[:, None], 0.0)
            if SCALED:
                group = start // 128
                input_scale = tl.load(x_scales + group * scale_stride + source, inside, 0.0)
                scale = tl.load(block + group)
                if GATED:
                    scale = tl.where(column % 2 == 0, scale, tl.load(block + group + OUT // 256 * SCALES))
                scale = tl.broadcast_to(scale, column.shape)
                if TURNED:
                    total += tl.dot(tl.trans(factor), tl.trans(values)) * (scale[:, None] * input_scale[None, :])
                else:
                    total += tl.dot(values, factor) * (input_scale[:, None] * scale[None, :])
            else:
                total = tl.dot(values, factor, total)
    if TURNED:
        total = tl.trans(total)
    if GATED:
        gate, up = tl.split(tl.reshape(total, (ROWS, COLUMNS // 2, 2)))
        half = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        place = out + choice.to(tl.int64)[:, None] * (OUT // 2) + half[None, :]
        tl.store(place, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), inside[:, None])
    else:
        total *= floats(weights + choice, inside)[:, None]
        part = (choice % CHOSEN).to(tl.int64) * num_tokens + choice // CHOSEN
        tl.store(out + part[:, None] * OUT + column[None, :], total.to(out.dtype.element_ty), inside[:, None])


@kernel(do_not_specialize=["num_tokens", "scale_stride"])
def _multiply_experts(
    x: tensor, x_scales: tensor, matrices: tensor, scales: tensor, weights: tensor, out: tensor, choices: tensor, experts: tensor,
    ranks: tensor, rows: tensor, num_tokens: tensor, scale_stride: tensor, LISTED: constexpr, BY_CHOICE: constexpr, GATED: constexpr,
    SCALED: constexpr, TURNED: constexpr, CHOSEN: constexpr, WIDTH: constexpr, OUT: constexpr, SCALES: constexpr, ROWS: constexpr,
    COLUMNS: constexpr, DEPTH: constexpr, STAGES: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: some columns of one block of sorted choices; or, if LISTED, of an expert's choices. BY_CHOICE, each choice has
    programs, which end at once unless it is its expert's first one."""
    TILES: tl.constexpr = OUT // COLUMNS
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert, first = block, block * ROWS
    await_kernel(OVERLAP)
    if LISTED:
        expert = tl.num_programs(0) // TILES - 1 - block  # the shared one, with the most choices, first
        if BY_CHOICE:
            expert = tl.where(tl.load(ranks + block) == 0, tl.load(experts + block), -1)
        count = tl.where(expert < 0, 0, tl.load(rows + tl.maximum(expert, 0)))
        first, end = expert * LISTED, count
    else:
        expert, count = tl.load(experts + block), tl.load(rows + block)
        end = tl.minimum(count, ROWS)
    for start in range(0, end, ROWS):
        row = start + tl.arange(0, ROWS)
        choice = tl.load(choices + first + row)
        _multiply(
            x, x_scales, matrices, scales, weights, out, expert, choice, row < count, tile, num_tokens, scale_stride,
            GATED, SCALED, TURNED, CHOSEN, WIDTH, OUT, SCALES, ROWS, COLUMNS, DEPTH, STAGES,
        )  # fmt: skip


Room = Callable[..., torch.Tensor]  # a tensor of the inputs' type by its shape


def sparse_swiglu(
    x_TD: torch.Tensor | GroupScaled, logits_STE: torch.Tensor, counts_E: torch.Tensor, experts: Experts, valid_T: torch.Tensor | None,
    room: Room,
) -> torch.Tensor:  # fmt: skip
    """Implement `TritonProducts.sparse_swiglu` for at least one token and matrices in bfloat16 or float8."""
    num_tokens, (down_rows, inner) = len(x_TD), experts.down.shape
    gate_up, down = experts.gate_up.products.matrix, experts.down.products.matrix
    capability, is_float8 = capability_of(logits_STE.device), isinstance(gate_up, BlockScaled)
    of_up, of_down = (expert_tiles(num_tokens, is_float8, capability, is_gated) for is_gated in (True, False))
    parts_KTD = room(experts.num_given, num_tokens, down_rows // experts.count)
    choices = route(logits_STE, experts, valid_T, parts_KTD, counts_E)
    blocks = sort(choices, of_up.rows) if choices.listed_EM is None else None
    inner_SI = parts_KTD.new_empty((num_tokens * experts.num_given, inner))
    _launch(x_TD, gate_up, choices, blocks, inner_SI, of_up, is_gated=True)
    _launch(inner_SI, down, choices, blocks, parts_KTD, of_down, is_gated=False)
    return parts_KTD


@kernel()
def _weighted_sum(
    values: tensor, chosen: tensor, weights: tensor, out: tensor, CHOSEN: constexpr, WIDTH: constexpr, COLUMNS: constexpr, ADD: constexpr,
    OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (t, j): the j-th COLUMNS columns of a token's sum."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    await_previous_kernel(OVERLAP)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(CHOSEN):
        choice = token * CHOSEN + k
        is_ours = tl.load(chosen + choice) >= 0  # other values there are invalid
        weight = tl.load(weights + choice).to(tl.float32)
        total += floats(values + choice * WIDTH + column, column < tl.where(is_ours, WIDTH, 0)) * tl.where(is_ours, weight, 0.0)
    place = out + token * WIDTH + column
    if ADD:
        total += floats(place, column < WIDTH)
    tl.store(place, total.to(out.dtype.element_ty), column < WIDTH)


def weighted_sum(values_SD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor, out_TD: torch.Tensor, adds: bool) -> None:
    """Write to `out_TD`, or add, the sum over each token's choices other than -1 of weight * value."""
    (num_tokens, chosen), width = chosen_TK.shape, out_TD.shape[1]
    assert all(tensor.is_contiguous() for tensor in (values_SD, chosen_TK, weights_TK, out_TD))
    _weighted_sum[(num_tokens, cdiv(width, SUM_COLUMNS))](
        values_SD, chosen_TK, weights_TK, out_TD, CHOSEN=chosen, WIDTH=width, COLUMNS=SUM_COLUMNS, ADD=adds, num_warps=SUM_WARPS,
    )  # fmt: skip


def _launch(
    x_TX: torch.Tensor | GroupScaled, stacked: Plain | BlockScaled, choices: Choices, blocks: SortedChoices | None, out: torch.Tensor,
    tiles: ExpertTiles, is_gated: bool,
) -> None:  # fmt: skip
    """Launch; inputs are tokens if it `is_gated`, otherwise values of each choice."""
    (num_tokens, chosen), (rows, width) = choices.experts_TK.shape, stacked.shape
    rows_out, is_scaled = rows // choices.num_experts, isinstance(stacked, BlockScaled)
    x, x_scales, scales, num_scales, scale_stride = x_TX, x_TX, stacked.values, 0, 0
    if isinstance(stacked, BlockScaled):
        x_TX, scales, num_scales = rounded(x_TX), stacked.padded_scales, stacked.padded_scales.shape[1]
        x, x_scales, scale_stride = x_TX.padded, x_TX.scales, len(x_TX.padded)
    columns = math.gcd(rows_out, tiles.columns)
    num_choices, is_by_choice = num_tokens * chosen, False
    if blocks is not None:
        num_blocks = len(blocks.experts_B)
        lists: tuple[torch.Tensor | None, ...] = blocks.choices, blocks.experts_B, blocks.experts_B, blocks.rows_B
    else:
        is_by_choice = num_choices <= choices.num_experts
        num_blocks = num_choices if is_by_choice else choices.num_experts
        lists = (choices.listed_EM, choices.experts_TK, choices.ranks_TK, choices.counts_E)
    _multiply_experts[(num_blocks * (rows_out // columns),)](
        x, x_scales, stacked.values, scales, choices.weights_TK, out, *lists, num_tokens, scale_stride,
        LISTED=MOST_LISTED if blocks is None else 0, BY_CHOICE=is_by_choice, GATED=is_gated, SCALED=is_scaled,
        TURNED=is_scaled and tiles.rows < TURNED_ROWS, CHOSEN=chosen, WIDTH=width, OUT=rows_out, SCALES=num_scales,
        ROWS=tiles.rows, COLUMNS=columns, DEPTH=math.gcd(width, tiles.depth), STAGES=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
