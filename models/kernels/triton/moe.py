"""Triton kernels of a mixture of SwiGLU experts that `routing` chose. A choice (slot) is token * CHOSEN + k: the token's k-th best expert,
or after these the shared one.

Programs for few tokens search all choices for those of their expert; many choices are sorted. The host is not involved.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.ops import Experts
from models.kernels.triton.launch import await_kernel, await_previous_kernel, capability_of, cdiv, floats, kernel
from models.kernels.triton.products import ExpertProducts, triton_products
from models.kernels.triton.routing import Choices, SortedChoices, route, sort
from models.kernels.triton.text import swiglu
from models.kernels.triton.tuned import FEW_CHOICES, ExpertTiles
from models.weights.matrix import Matrix

SUM_COLUMNS, SUM_WARPS = 1024, 4  # per program of `_weighted_sum`
TURNED_ROWS = 64  # with fewer rows, untransposed float8 products would use a wider type


@triton.jit
def _scaled_dot(values: tensor, factor: tensor, input_scale: tensor, scale: tensor, TURNED: constexpr) -> tensor:
    """values (R, K) times factor (K, C), with the scales of their rows and columns: (R, C), or (C, R) if TURNED."""
    if TURNED:
        product = tl.dot(tl.trans(factor), tl.trans(values)) * (scale[:, None] * input_scale[None, :])
    else:
        product = tl.dot(values, factor) * (input_scale[:, None] * scale[None, :])
    return product


@triton.jit
def _column_scales(place: tensor, column: tensor, DISTANCE: constexpr) -> tensor:
    """Load the scale at `place`; every other column uses the one at DISTANCE after it, if any."""
    scale = tl.load(place)
    if DISTANCE:
        scale = tl.where(column % 2 == 0, scale, tl.load(place + DISTANCE))
    return tl.broadcast_to(scale, column.shape)


@triton.jit
def _dot_of_codes(values: tensor, words: tensor, zero: tensor, PER_WORD: constexpr) -> tensor:
    """Return values (R, K) times the codes minus zero points (C,) in words (K / PER_WORD, C); each word holds values K / PER_WORD apart."""
    BITS: tl.constexpr = 32 // PER_WORD
    codes = (words[None, :, :] >> (tl.arange(0, PER_WORD) * BITS)[:, None, None]) & ((1 << BITS) - 1)
    factor = tl.reshape(codes, (words.shape[0] * PER_WORD, words.shape[1])).to(tl.float32) - zero[None, :]
    return tl.dot(values, factor.to(values.dtype))  # exact in bfloat16


@triton.jit
def _multiply(
    x: tensor, x_scales: tensor, matrices: tensor, scales: tensor, zeros: tensor, weights: tensor, out: tensor, expert: tensor,
    slot: tensor, inside: tensor, tile: tensor, num_tokens: tensor, scale_stride: tensor, GATED: constexpr, SCALED: constexpr,
    TURNED: constexpr, PER_WORD: constexpr, MIDDLE: constexpr, HAS_ZEROS: constexpr, CHOSEN: constexpr, WIDTH: constexpr, OUT: constexpr,
    SCALES: constexpr, ROWS: constexpr, COLUMNS: constexpr, DEPTH: constexpr, STAGES: constexpr,
) -> None:  # fmt: skip
    """Multiply ROWS choices of an expert by COLUMNS of its OUT rows of WIDTH values; columns of a projection share a block of scales.

    GATED: inputs are tokens, rows alternate between gate and up projections, and the SwiGLU of each choice is stored. Otherwise inputs are
    these values, and results times the router's weights are partial sums of tokens. TURNED: ROWS are columns of the MMA.
    """
    column, depth = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    source, row, first = slot, column, tile * COLUMNS
    if GATED:
        source, row, first = slot // CHOSEN, column % 2 * (OUT // 2) + column // 2, tile * (COLUMNS // 2)
    inputs = x + source.to(tl.int64)[:, None] * WIDTH + depth[None, :]
    row_of_all = expert.to(tl.int64) * OUT + row
    factors = matrices + row_of_all[None, :] * WIDTH + depth[:, None]
    if PER_WORD:
        factors = matrices + row_of_all[None, :] * (WIDTH // PER_WORD) + tl.arange(0, DEPTH // PER_WORD)[:, None]
    block = scales + (expert * (OUT // 128) + first // 128) * SCALES
    total = tl.zeros((COLUMNS, ROWS) if TURNED else (ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, WIDTH // DEPTH, num_stages=STAGES):
        values = tl.load(inputs + step * DEPTH, inside[:, None], 0.0)
        factor = tl.load(factors + step * (DEPTH // PER_WORD if PER_WORD else DEPTH))
        if PER_WORD:
            place = row_of_all * SCALES + step * DEPTH // (WIDTH // SCALES)
            zero = tl.load(zeros + place).to(tl.float32) if HAS_ZEROS else tl.full((COLUMNS,), MIDDLE, tl.float32)
            total += _dot_of_codes(values, factor, zero, PER_WORD) * tl.load(scales + place).to(tl.float32)[None, :]
        elif SCALED:
            group = step * DEPTH // 128
            input_scale = tl.load(x_scales + group * scale_stride + source, inside, 0.0)
            scale = _column_scales(block + group, column, OUT // 256 * SCALES if GATED else 0)
            total += _scaled_dot(values, factor, input_scale, scale, TURNED)
        else:
            total = tl.dot(values, factor, total)
    if TURNED:
        total = tl.trans(total)
    if GATED:
        gate, up = tl.split(tl.reshape(total, (ROWS, COLUMNS // 2, 2)))
        half = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        place = out + slot.to(tl.int64)[:, None] * (OUT // 2) + half[None, :]
        tl.store(place, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), inside[:, None])
    else:
        total *= floats(weights + slot, inside)[:, None]
        part = (slot % CHOSEN).to(tl.int64) * num_tokens + slot // CHOSEN
        tl.store(out + part[:, None] * OUT + column[None, :], total.to(out.dtype.element_ty), inside[:, None])


@kernel(do_not_specialize=["num_slots", "num_tokens", "scale_stride"])
def _multiply_experts(
    x: tensor, x_scales: tensor, matrices: tensor, scales: tensor, zeros: tensor, weights: tensor, out: tensor, choices: tensor,
    experts: tensor, rows: tensor, num_slots: tensor, num_tokens: tensor, scale_stride: tensor, SLOTS: constexpr, GATED: constexpr,
    SCALED: constexpr, TURNED: constexpr, PER_WORD: constexpr, MIDDLE: constexpr, HAS_ZEROS: constexpr, CHOSEN: constexpr, WIDTH: constexpr,
    OUT: constexpr, SCALES: constexpr, ROWS: constexpr, COLUMNS: constexpr, DEPTH: constexpr, STAGES: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """With SLOTS, program (i, j) computes the j-th columns of the expert of choice i, unless an earlier choice has the same expert.
    Otherwise a program computes some columns of one block of sorted `choices`, in order of blocks."""
    await_kernel(OVERLAP)
    if SLOTS:
        index, every = tl.program_id(0), tl.arange(0, SLOTS)
        expert_of = tl.load(choices + every, every < num_slots, -1)
        expert = tl.load(choices + index)
        mine = (expert_of == expert).to(tl.int32)
        is_later = tl.sum(tl.where(every < index, mine, 0), 0) > 0
        count = tl.where(is_later | (expert < 0), 0, tl.sum(mine, 0))
        rank = tl.cumsum(mine, 0) - 1
        for start in range(0, count, ROWS):
            row = start + tl.arange(0, ROWS)
            is_row = (mine[None, :] > 0) & (rank[None, :] == row[:, None])
            slot = tl.sum(tl.where(is_row, every[None, :], 0), 1)
            _multiply(
                x, x_scales, matrices, scales, zeros, weights, out, expert, slot, row < count, tl.program_id(1), num_tokens,
                scale_stride, GATED, SCALED, TURNED, PER_WORD, MIDDLE, HAS_ZEROS, CHOSEN, WIDTH, OUT, SCALES, ROWS, COLUMNS, DEPTH, STAGES,
            )  # fmt: skip
    else:
        TILES: tl.constexpr = OUT // COLUMNS
        block, row = tl.program_id(0) // TILES, tl.arange(0, ROWS)
        expert, count = tl.load(experts + block), tl.load(rows + block)
        if count > 0:
            slot = tl.load(choices + block * ROWS + row, row < count, 0)
            _multiply(
                x, x_scales, matrices, scales, zeros, weights, out, expert, slot, row < count, tl.program_id(0) % TILES, num_tokens,
                scale_stride, GATED, SCALED, TURNED, PER_WORD, MIDDLE, HAS_ZEROS, CHOSEN, WIDTH, OUT, SCALES, ROWS, COLUMNS, DEPTH, STAGES,
            )  # fmt: skip


def sparse_swiglu(x_TD: torch.Tensor, logits_TE: torch.Tensor, experts: Experts, valid_T: torch.Tensor | None) -> torch.Tensor:
    """Return (S, T, D), see `Ops`, from the router's logits `logits_TE`, for at least one token."""
    (num_tokens, width), products = x_TD.shape, triton_products(experts.gate_up)
    num_slots = num_tokens * experts.num_given
    if (own := products.expert_products(experts)) is not None:
        return _own_swiglu(own, x_TD, experts, route(logits_TE, experts, valid_T, counted=True))
    tiles = products.expert_tiles(num_tokens, capability_of(x_TD.device))
    parts_KTD, is_much = x_TD.new_empty((experts.num_given, num_tokens, width)), num_slots > FEW_CHOICES
    choices = route(logits_TE, experts, valid_T, parts_KTD, counted=is_much)
    blocks = sort(choices, tiles.rows) if is_much else None
    inner_SI = x_TD.new_empty((num_slots, experts.down.shape[1]))
    _launch(x_TD, experts.gate_up, choices, blocks, inner_SI, tiles, is_gated=True)
    _launch(inner_SI, experts.down, choices, blocks, parts_KTD, tiles, is_gated=False)
    return parts_KTD


def _own_swiglu(own: ExpertProducts, x_TD: torch.Tensor, experts: Experts, choices: Choices) -> torch.Tensor:
    """Return (1, T, D) by a format's own products."""
    gate_up, down, num_slots = experts.gate_up.storage, experts.down.storage, choices.experts_TK.numel()
    blocks = sort(choices, own.rows_of(gate_up, num_slots), is_filled=True)
    inner_SI = swiglu(own.of_choices(x_TD, gate_up, blocks, experts.num_given))
    if (rows := own.rows_of(down, num_slots)) != blocks.rows:
        blocks = sort(choices, rows, is_filled=True)
    sum_TD = torch.empty_like(x_TD)
    weighted_sum(own.of_choices(inner_SI, down, blocks, 1), choices.experts_TK, choices.weights_TK, sum_TD, adds=False)
    return sum_TD[None]


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
        slot = token * CHOSEN + k
        is_ours = tl.load(chosen + slot) >= 0  # other values there are invalid
        weight = tl.load(weights + slot).to(tl.float32)
        total += floats(values + slot * WIDTH + column, column < tl.where(is_ours, WIDTH, 0)) * tl.where(is_ours, weight, 0.0)
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
    x: torch.Tensor, matrices: Matrix, choices: Choices, blocks: SortedChoices | None, out: torch.Tensor, tiles: ExpertTiles, is_gated: bool
) -> None:
    """Launch; x holds tokens if it `is_gated`, otherwise values of each choice."""
    (num_tokens, chosen), width = choices.experts_TK.shape, matrices.shape[1]
    rows_out = matrices.shape[0] // choices.num_experts
    given = triton_products(matrices).expert_operands(x, matrices.storage, num_tokens)
    columns = math.gcd(rows_out, tiles.up_columns if is_gated else tiles.down_columns)
    depth, is_scaled, num_scales = math.gcd(width, tiles.depth), given.num_scales > 0, given.num_scales
    zeros, middle, per_word = given.scales, 0, 0
    if (codes := given.codes) is not None:
        depth, num_scales, middle, per_word = codes.run * codes.per_word, codes.groups, codes.middle, codes.per_word
        zeros = zeros if codes.zeros is None else codes.zeros
    num_tiles, num_slots = rows_out // columns, num_tokens * chosen
    if blocks is not None:
        grid, slots, lists = (len(blocks.experts_B) * num_tiles, 1), 0, (blocks.slots, blocks.experts_B, blocks.rows_B)
    else:
        grid, slots = (num_slots, num_tiles), next(size for size in (16, 128, FEW_CHOICES) if size >= num_slots)
        lists = (choices.experts_TK,) * 3
    _multiply_experts[grid](
        given.inputs, given.input_scales, given.matrices, given.scales, zeros, choices.weights_TK, out, *lists,
        num_slots, num_tokens, given.scale_stride,
        SLOTS=slots, GATED=is_gated, SCALED=is_scaled, TURNED=is_scaled and tiles.rows < TURNED_ROWS,
        PER_WORD=per_word, MIDDLE=middle, HAS_ZEROS=codes is not None and codes.zeros is not None,
        CHOSEN=chosen, WIDTH=width, OUT=rows_out, SCALES=num_scales,
        ROWS=tiles.rows, COLUMNS=columns, DEPTH=depth, STAGES=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
