"""Gated DeltaNet in Triton (`layers.delta`). Convolution and gates, then decode rows token by token and prompt rows in chunks:

    _prepare, each chunk for itself:    (I + L) U = beta V,  (I + L) W = beta e^G K,  P = [q_i k_j e^(G_i - G_j) for j <= i]
    _scan, a row's chunks in order:     U' = U - W S,  O = e^G Q S + P U',  S = e^(G_last) S + K' (e^(G_last - G) U')

I + L is inverted by substitution and by blocks, since powers of L would lose all precision where keys are similar. Starts of rows and
numbers of accepted drafts are read on the device, so that a graph serves any. Operands have the model's dtype, sums are float32.
"""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.ops import DELTA_CHUNK, DeltaHeads, DeltaState, StateRows
from models.kernels.triton.launch import await_kernel, await_previous_kernel, cdiv, floats, kernel, power_of_2

# Rows and starts are slices of a staging buffer: no recompilation for another alignment.
LEVELS = 2  # a chunk has 2^LEVELS blocks, whose triangular systems are solved line by line and then joined in pairs
MANY_ROWS = 128  # the default of --max-num-seqs: `_prepare` has one version for so many
MANY_TOKENS, TOKENS_OF_MANY = 32, 16  # from so many tokens on, a program of the convolution processes several
KEPT_CHANNELS, STEP_COLUMNS, SCAN_COLUMNS, NORM_LINES = 256, 64, 64, 8  # per program: inputs, values of a state, heads
STEP_WARPS, PREPARE_WARPS, SCAN_WARPS, SCAN_STAGES = 2, 4, 4, 3
L2_EPS, PRECISION = tl.constexpr(1e-6), tl.constexpr("tf32x3")  # products of float32 values are nearly exact


@triton.jit
def _gates_of(gates: tensor, a_log: tensor, dt_bias: tensor, token: tensor, inside: tensor, head: tensor, HEADS: constexpr) -> tensor:
    """Load the logarithms of the decay, 0 outside."""
    a = floats(gates + token.to(tl.int64) * (2 * HEADS) + HEADS + head, inside) + tl.load(dt_bias + head)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    return tl.where(inside, -tl.exp(tl.load(a_log + head)) * softplus, 0.0)


@triton.jit
def _rates_of(gates: tensor, token: tensor, inside: tensor, head: tensor, HEADS: constexpr) -> tensor:
    """Load beta, 0 outside."""
    b = floats(gates + token.to(tl.int64) * (2 * HEADS) + head, inside)
    return tl.where(inside, 1.0 / (1.0 + tl.exp(-b)), 0.0)


@kernel(do_not_specialize=["num_tokens", "num_rows"], do_not_specialize_on_alignment=["starts", "sources", "firsts"])
def _convolve(
    inputs: tensor, conv: tensor, before: tensor, accepted: tensor, starts: tensor, sources: tensor, firsts: tensor, out: tensor,
    num_tokens: tensor, num_rows: tensor, stride: tensor, row_stride: tensor, CHANNELS: constexpr, DIM: constexpr, KEY_HEADS: constexpr,
    TAPS: constexpr, TOKENS: constexpr, ROWS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (i, h): convolution and SiLU of TOKENS tokens of head h of queries, keys or values; queries and keys are normalised."""
    token, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    inside = token < num_tokens
    every = tl.arange(0, ROWS)
    first = tl.load(starts + every, every < num_rows, 2147483647)
    row = tl.sum((first[None, :] <= token[:, None]).to(tl.int32), 1) - 1
    start = tl.load(firsts + row, inside, 0)
    place = tl.load(sources + row, inside, 0)
    kept = before + place * row_stride + tl.load(accepted + place, inside, 0) * CHANNELS
    channel = head * DIM + tl.arange(0, DIM)
    total = tl.zeros((TOKENS, DIM), tl.float32)
    await_previous_kernel(OVERLAP)
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1) + tap
        is_new = at >= start
        new = tl.load(inputs + at.to(tl.int64)[:, None] * stride + channel[None, :], (inside & is_new)[:, None], 0.0)
        place = (TAPS - 1 + at - start)[:, None] * CHANNELS + channel[None, :]
        old = tl.load(kept[:, None] + place, (inside & (at < start))[:, None], 0.0)
        total += (new.to(tl.float32) + old.to(tl.float32)) * tl.load(conv + channel * TAPS + tap).to(tl.float32)[None, :]
    total = total.to(out.dtype.element_ty).to(tl.float32)
    value = (total / (1.0 + tl.exp(-total))).to(out.dtype.element_ty).to(tl.float32)
    if head < 2 * KEY_HEADS:
        length = tl.rsqrt(tl.sum(value * value, 1) + L2_EPS)
        if head < KEY_HEADS:
            length *= DIM**-0.5
        value *= length[:, None]
    place = token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), inside[:, None])


@kernel(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["rows", "starts", "sources", "firsts"])
def _keep(
    inputs: tensor, mixed: tensor, gates: tensor, before: tensor, kept_mixed: tensor, kept_gates: tensor, accepted: tensor, rows: tensor,
    starts: tensor, sources: tensor, firsts: tensor, first_row: tensor, stride: tensor, row_stride: tensor, CHANNELS: constexpr,
    HEADS: constexpr, TAPS: constexpr, WIDTH: constexpr, GATES: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (r, c): store the last inputs of row r, WIDTH channels, and the inputs of its drafts. Reads are after the writes."""
    row, channel = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    await_previous_kernel(OVERLAP)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    if start == end:
        return
    drafts = end if row < first_row else start + 1
    inside, place, source, first = channel < CHANNELS, tl.load(rows + row), tl.load(sources + row), tl.load(firsts + row)
    kept = before + place * row_stride + channel
    again = before + source * row_stride + channel + tl.load(accepted + source) * CHANNELS
    for tap in tl.static_range(TAPS - 1):
        at = drafts - (TAPS - 1) + tap
        if at >= first:
            value = tl.load(inputs + at.to(tl.int64) * stride + channel, inside, 0.0)
        else:
            value = tl.load(again + (TAPS - 1 + at - first) * CHANNELS, inside, 0.0)
        tl.store(kept + tap * CHANNELS, value, inside)
    gate = tl.arange(0, GATES)
    for number in range(0, end - drafts):
        token = drafts.to(tl.int64) + number
        tl.store(kept + (TAPS - 1 + number) * CHANNELS, tl.load(inputs + token * stride + channel, inside, 0.0), inside)
        of_draft = place * row_stride + number * CHANNELS + channel
        tl.store(kept_mixed + of_draft, tl.load(mixed + token * CHANNELS + channel, inside, 0.0), inside)
        if tl.program_id(1) == 0:
            line = kept_gates + place * row_stride + number * (2 * HEADS)
            tl.store(line + gate, tl.load(gates + token * (2 * HEADS) + gate, gate < 2 * HEADS, 0.0), gate < 2 * HEADS)


@triton.jit
def _advance(
    state: tensor, memory: tensor, mixed: tensor, gates: tensor, a_log: tensor, dt_bias: tensor, token: tensor, head: tensor,
    column: tensor, CHANNELS: constexpr, HEADS: constexpr, KEY_HEADS: constexpr, DIM: constexpr,
) -> tensor:  # fmt: skip
    """Return the state of a head after a token, rounded to the type of the memory: drafts change nothing."""
    line, there = mixed + token * CHANNELS, token >= 0
    k = tl.load(line + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * DIM + tl.arange(0, DIM)).to(tl.float32)
    v = tl.load(line + (2 * KEY_HEADS + head) * DIM + column).to(tl.float32)
    state *= tl.exp(_gates_of(gates, a_log, dt_bias, token, there, head, HEADS))
    change = (v - tl.sum(state * k[:, None], 0)) * _rates_of(gates, token, there, head, HEADS)
    return (state + k[:, None] * change[None, :]).to(memory.dtype.element_ty).to(tl.float32)


@kernel(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["rows", "starts"])
def _step(
    mixed: tensor, gates: tensor, a_log: tensor, dt_bias: tensor, memory: tensor, kept_mixed: tensor, kept_gates: tensor,
    accepted: tensor, rows: tensor, starts: tensor, out: tensor, first_row: tensor, row_stride: tensor, kept_stride: tensor,
    CHANNELS: constexpr, HEADS: constexpr, KEY_HEADS: constexpr, DIM: constexpr, COLUMNS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (r, h, v): the accepted drafts of row `first_row` + r, then its tokens one by one, for head h and COLUMNS values. The state
    after its first token is stored."""
    row, head = first_row + tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    if start == end:
        await_kernel(OVERLAP)
        return
    key, column = tl.arange(0, DIM), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    permanent = tl.load(rows + row)
    kept = permanent * kept_stride
    place = permanent * row_stride + head * (DIM * DIM) + key[:, None] * DIM + column[None, :]
    state = tl.load(memory + place).to(tl.float32)
    for number in range(0, tl.load(accepted + permanent).to(tl.int32)):
        token = tl.cast(number, tl.int64)
        state = _advance(
            state, memory, kept_mixed + kept, kept_gates + kept, a_log, dt_bias, token, head, column, CHANNELS, HEADS, KEY_HEADS, DIM
        )  # fmt: skip
    await_previous_kernel(OVERLAP)  # the previous kernel writes nothing that is read above
    for number in range(0, end - start):
        token = start.to(tl.int64) + number
        state = _advance(state, memory, mixed, gates, a_log, dt_bias, token, head, column, CHANNELS, HEADS, KEY_HEADS, DIM)
        if number == 0:
            tl.store(memory + place, state.to(memory.dtype.element_ty))
        q = tl.load(mixed + token * CHANNELS + head // (HEADS // KEY_HEADS) * DIM + key).to(tl.float32)
        result = tl.sum(state * q[:, None], 0)
        tl.store(out + (token * HEADS + head) * DIM + column, result.to(out.dtype.element_ty))


@triton.jit
def _product(a: tensor, b: tensor, DTYPE: constexpr) -> tensor:
    """Multiply float32 values by values of float32 or DTYPE: as sums of two values of DTYPE."""
    a_high, b_high = a.to(DTYPE), b.to(DTYPE)
    total = tl.dot((a - a_high.to(tl.float32)).to(DTYPE), b_high, input_precision=PRECISION)
    if b.dtype != DTYPE:
        total = tl.dot(a_high, (b - b_high.to(tl.float32)).to(DTYPE), total, input_precision=PRECISION)
    return tl.dot(a_high, b_high, total, input_precision=PRECISION)


@triton.jit
def _inverse(coupling: tensor, CHUNK: constexpr, LEVELS: constexpr, DTYPE: constexpr) -> tensor:
    """Invert I + L for a strictly lower triangular L: blocks by substitution, all at once, then pairs of blocks by
    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]."""
    BLOCKS: tl.constexpr = 1 << LEVELS
    SIZE: tl.constexpr = CHUNK // BLOCKS
    index, block = tl.arange(0, SIZE), tl.arange(0, BLOCKS)
    is_own = block[:, None, None, None] == block[None, None, :, None]
    system = tl.sum(tl.where(is_own, tl.reshape(coupling, (BLOCKS, SIZE, BLOCKS, SIZE)), 0.0), 2)
    result = -system  # without the diagonal
    for i in range(2, SIZE):
        mine = index[None, :, None] == i
        line = tl.sum(tl.where(mine, system, 0.0), 1)
        result = tl.where(mine, result - tl.sum(line[:, :, None] * result, 1)[:, None, :], result)
    result = tl.where(index[None, :, None] == index[None, None, :], 1.0, result)
    whole = tl.reshape(tl.where(is_own, result[:, :, None, :], 0.0), (CHUNK, CHUNK))
    for level in tl.static_range(LEVELS):
        half = tl.arange(0, CHUNK) // (SIZE << level)
        between = tl.where((half[:, None] ^ half[None, :]) == 1, coupling, 0.0)  # the halves of a pair
        whole -= _product(_product(whole, between, DTYPE), whole, DTYPE)
    return whole


@triton.jit
def _chunk_of(starts: tensor, chunk: tensor, num_rows: tensor, CHUNK: constexpr, ROWS: constexpr) -> tuple[tensor, tensor]:
    """Return the first token of a chunk and the end of its row; chunks are numbered row by row. The end is 0 beyond the last chunk."""
    row = tl.arange(0, ROWS)
    inside = row < num_rows
    first, end = tl.load(starts + row, inside, 0), tl.load(starts + row + 1, inside, 0)
    counts = (end - first + CHUNK - 1) // CHUNK
    ends = tl.cumsum(counts, 0)
    mine = (ends > chunk) & (ends - counts <= chunk)
    token = tl.sum(tl.where(mine, first + (chunk - ends + counts) * CHUNK, 0), 0)
    return token, tl.sum(tl.where(mine, end, 0), 0)


@kernel(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["starts"])
def _prepare(
    mixed: tensor, gates: tensor, a_log: tensor, dt_bias: tensor, starts: tensor, u: tensor, w: tensor, p: tensor, sums: tensor,
    num_rows: tensor, CHANNELS: constexpr, HEADS: constexpr, KEY_HEADS: constexpr, DIM: constexpr, CHUNK: constexpr, LEVELS: constexpr,
    ROWS: constexpr,
) -> None:  # fmt: skip
    """Program (c, h): chunk c of head h."""
    first, end = _chunk_of(starts, tl.program_id(0), num_rows, CHUNK, ROWS)
    if end == 0:
        return
    head, dim = tl.program_id(1), tl.arange(0, DIM)
    key_head = head // (HEADS // KEY_HEADS)
    token = first + tl.arange(0, CHUNK)
    inside = token < end
    total = tl.cumsum(_gates_of(gates, a_log, dt_bias, token, inside, head, HEADS), 0)
    beta = _rates_of(gates, token, inside, head, HEADS)
    line, mine = mixed + token.to(tl.int64)[:, None] * CHANNELS + dim[None, :], token.to(tl.int64) * HEADS + head
    tl.store(sums + mine, total, inside)
    queries = tl.load(line + key_head * DIM, inside[:, None], 0.0)
    keys = tl.load(line + (KEY_HEADS + key_head) * DIM, inside[:, None], 0.0)
    distance = token[:, None] - token[None, :]
    decay = tl.where(distance >= 0, tl.exp(tl.where(distance >= 0, total[:, None] - total[None, :], 0.0)), 0.0)
    attended = decay * tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    tl.store(p + mine[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :], attended.to(p.dtype.element_ty), inside[:, None])
    coupling = beta[:, None] * decay * tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    dtype = keys.dtype
    inverse = _inverse(tl.where(distance > 0, coupling, 0.0), CHUNK, LEVELS, dtype)
    place, values = mine[:, None] * DIM + dim[None, :], tl.load(line + (2 * KEY_HEADS + head) * DIM, inside[:, None], 0.0)
    tl.store(u + place, _product(inverse * beta[None, :], values, dtype).to(dtype), inside[:, None])
    inverse *= (beta * tl.exp(total))[None, :]
    tl.store(w + place, _product(inverse, keys, dtype).to(dtype), inside[:, None])


@kernel(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "starts", "sources", "firsts"])
def _scan(
    mixed: tensor, u: tensor, w: tensor, p: tensor, sums: tensor, memory: tensor, rows: tensor, starts: tensor, sources: tensor,
    firsts: tensor, out: tensor, num_rows: tensor, row_stride: tensor, CHANNELS: constexpr, HEADS: constexpr, KEY_HEADS: constexpr,
    DIM: constexpr, CHUNK: constexpr, COLUMNS: constexpr, STAGES: constexpr,
) -> None:  # fmt: skip
    """Program (r, h, v): the chunks of row r and of the rows that continue it, for head h and COLUMNS values."""
    row, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    if (start == end) | (tl.load(firsts + row) < start):
        return
    key, index, column = tl.arange(0, DIM), tl.arange(0, CHUNK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = head * (DIM * DIM) + key[:, None] * DIM + column[None, :]
    state = tl.load(memory + tl.load(sources + row) * row_stride + place).to(tl.float32)
    key_head = head // (HEADS // KEY_HEADS)
    dtype = mixed.dtype.element_ty
    while start < end:
        for first in tl.range(start, end, CHUNK, num_stages=STAGES):
            token = first + index
            inside = token < end
            line, mine = token.to(tl.int64)[:, None] * CHANNELS, (token.to(tl.int64) * HEADS + head)[:, None]
            q = tl.load(mixed + line + key_head * DIM + key[None, :], inside[:, None], 0.0)
            k = tl.load(mixed + line + (KEY_HEADS + key_head) * DIM + key[None, :], inside[:, None], 0.0)
            w_here = tl.load(w + mine * DIM + key[None, :], inside[:, None], 0.0)
            changes = floats(u + mine * DIM + column[None, :], inside[:, None])
            attended = tl.load(p + mine * CHUNK + index[None, :], inside[:, None], 0.0)
            total = tl.load(sums + token.to(tl.int64) * HEADS + head, inside, 0.0)
            last = tl.min(total, 0)  # sums never grow
            rounded = state.to(dtype)
            changes -= tl.dot(w_here, rounded, input_precision=PRECISION)
            result = tl.dot(q, rounded, input_precision=PRECISION) * tl.exp(total)[:, None]
            result = tl.dot(attended, changes.to(dtype), result, input_precision=PRECISION)
            left = (changes * tl.exp(last - total)[:, None]).to(dtype)
            state = tl.dot(tl.trans(k), left, state * tl.exp(last), input_precision=PRECISION)
            tl.store(out + mine * DIM + column[None, :], result.to(out.dtype.element_ty), inside[:, None])
        state = state.to(memory.dtype.element_ty).to(tl.float32)
        tl.store(memory + tl.load(rows + row) * row_stride + place, state.to(memory.dtype.element_ty))
        row, start = row + 1, end
        goes_on = tl.load(firsts + row, row < num_rows, 2147483647) < start
        end = tl.where(goes_on, tl.load(starts + row + 1, row < num_rows, 0), start)


@kernel(do_not_specialize=["num_lines"])
def _gated_norm(
    o: tensor, z: tensor, weight: tensor, out: tensor, eps: tensor, num_lines: tensor, stride: tensor, HEADS: constexpr, DIM: constexpr,
    LINES: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program i: normalise LINES heads of tokens."""
    await_previous_kernel(OVERLAP)
    line, dim = tl.program_id(0) * LINES + tl.arange(0, LINES).to(tl.int64), tl.arange(0, DIM)
    inside = (line < num_lines)[:, None]
    value = floats(o + line[:, None] * DIM + dim[None, :], inside)
    gate = floats(z + (line // HEADS)[:, None] * stride + (line % HEADS)[:, None] * DIM + dim[None, :], inside)
    value *= tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None]
    value = value.to(out.dtype.element_ty).to(tl.float32) * tl.load(weight + dim).to(tl.float32)[None, :]
    value = value.to(out.dtype.element_ty).to(tl.float32) * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + line[:, None] * DIM + dim[None, :], value.to(out.dtype.element_ty), inside)


def delta_rule(heads: DeltaHeads, state: DeltaState, rows: StateRows) -> torch.Tensor:
    """Implement `Ops.delta_rule_` for equal numbers of keys and values per head, a power of two."""
    memory, before, kept = state.recurrent_RHKV, state.inputs_RWC, (state.mixed_RDC, state.gates_RDG, state.num_accepted_R)
    num_heads, dim, value_dim = memory.shape[1:]
    assert dim == value_dim == heads.key_dim and heads.inputs_TX.stride(1) == 1 and heads.gates_TX.is_contiguous()
    assert not state.gates_RDG.numel() or before.stride(0) == state.mixed_RDC.stride(0) == state.gates_RDG.stride(0)
    num_tokens, num_rows, stride = len(heads.inputs_TX), len(rows.rows_R), heads.inputs_TX.stride(0)
    channels, taps = heads.conv_CW.shape
    sizes = {"CHANNELS": channels, "HEADS": num_heads, "KEY_HEADS": heads.num_key_heads, "DIM": dim}
    mixed_TC = heads.inputs_TX.new_empty((num_tokens, channels))
    tokens = 1 if num_tokens < MANY_TOKENS else TOKENS_OF_MANY
    _convolve[(cdiv(num_tokens, tokens), channels // dim)](
        heads.inputs_TX, heads.conv_CW, before, state.num_accepted_R, rows.starts_R1, *rows.origins, mixed_TC, num_tokens, num_rows,
        stride, before.stride(0), CHANNELS=channels, DIM=dim, KEY_HEADS=heads.num_key_heads, TAPS=taps, TOKENS=tokens,
        ROWS=_padded(num_rows),
    )  # fmt: skip
    o_THV = mixed_TC.new_empty((num_tokens, num_heads, dim))
    if rows.num_prefill_rows:
        _chunked(heads, memory, rows, mixed_TC, o_THV, sizes)
    if num_rows > rows.num_prefill_rows:
        columns = min(dim, STEP_COLUMNS)
        _step[(num_rows - rows.num_prefill_rows, num_heads, dim // columns)](
            mixed_TC, heads.gates_TX, heads.a_log_H, heads.dt_bias_H, memory, *kept, rows.rows_R, rows.starts_R1, o_THV,
            rows.num_prefill_rows, memory.stride(0), before.stride(0), COLUMNS=columns, num_warps=STEP_WARPS, **sizes,
        )  # fmt: skip
    _keep[(num_rows, cdiv(channels, KEPT_CHANNELS))](
        heads.inputs_TX, mixed_TC, heads.gates_TX, before, *kept, rows.rows_R, rows.starts_R1, *rows.origins, rows.num_prefill_rows,
        stride, before.stride(0), CHANNELS=channels, HEADS=num_heads, TAPS=taps, WIDTH=KEPT_CHANNELS,
        GATES=power_of_2(2 * num_heads),
    )  # fmt: skip
    out_TX = heads.inputs_TX.new_empty((num_tokens, num_heads * dim))
    lines = num_tokens * num_heads
    _gated_norm[(cdiv(lines, NORM_LINES),)](
        o_THV, heads.inputs_TX[:, channels:], heads.norm_V, out_TX, heads.eps, lines, stride,
        HEADS=num_heads, DIM=dim, LINES=NORM_LINES,
    )  # fmt: skip
    return out_TX


def _padded(num_rows: int) -> int:
    """Round up to few sizes, since each is compiled at its first use."""
    return 16 if num_rows <= 16 else max(MANY_ROWS, power_of_2(num_rows))


def _chunked(
    heads: DeltaHeads, memory: torch.Tensor, rows: StateRows, mixed_TC: torch.Tensor, o_THV: torch.Tensor, sizes: dict[str, int]
) -> None:
    """Compute rows of prompts. Each row has at most one partial chunk."""
    num_tokens, num_heads, dim = o_THV.shape
    num_rows = rows.num_prefill_rows
    num_chunks = num_tokens // DELTA_CHUNK + num_rows
    u_THV, w_THV = torch.empty_like(o_THV), torch.empty_like(o_THV)
    p_THC = mixed_TC.new_empty((num_tokens, num_heads, DELTA_CHUNK))
    sums_TH = heads.a_log_H.new_empty((num_tokens, num_heads))
    _prepare[(num_chunks, num_heads)](
        mixed_TC, heads.gates_TX, heads.a_log_H, heads.dt_bias_H, rows.starts_R1, u_THV, w_THV, p_THC, sums_TH, num_rows,
        CHUNK=DELTA_CHUNK, LEVELS=LEVELS, ROWS=max(MANY_ROWS, power_of_2(num_rows)), num_warps=PREPARE_WARPS, **sizes,
    )  # fmt: skip
    columns = min(dim, SCAN_COLUMNS)
    _scan[(num_rows, num_heads, dim // columns)](
        mixed_TC, u_THV, w_THV, p_THC, sums_TH, memory, rows.rows_R, rows.starts_R1, *rows.origins, o_THV, num_rows, memory.stride(0),
        CHUNK=DELTA_CHUNK, COLUMNS=columns, STAGES=SCAN_STAGES, num_warps=SCAN_WARPS, **sizes,
    )  # fmt: skip
