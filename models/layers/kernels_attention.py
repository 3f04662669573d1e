"""The Triton kernel of decode attention: one query token a row over paged keys and values. Called by `decode_attention`.

Bound by memory: every cached key and value is read once. Products are of the pool's type, everything else is float32. Tests run it in
Triton's interpreter.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.layers.kernels_text import launch_early
from models.layers.ops import KVPool

TILE = 32  # tokens at once
STAGES = 4  # tiles under way, and the one that is worked on
WARPS = 2
UNIT_FIELDS = 8  # seven are used: a unit is one aligned piece of memory
MIN_DOT_ROWS = 16
MERGE_VALUES = 8192  # of partial results at once


@triton.jit
def _attend(
    query: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    ids: tl.tensor,
    pages: tl.tensor,
    head: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Softmax over tokens `start : stop` so far: maximum (base 2), sum and weighted values. `ids` are the pages of the first tile's tokens.

    Tokens behind the end are the last one again, so that loads need no mask; their weight is zero. Page ids are a tile ahead of the keys.
    """
    dim = tl.arange(0, WIDTH)
    token = start + tl.arange(0, TILE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, TILE], tl.float32)  # summed up once, at the end
    values = tl.zeros([ROWS, WIDTH], tl.float32)
    for _ in range(start, stop, TILE):
        slot = ids.to(tl.int64) * PAGE + tl.minimum(token, stop - 1) % PAGE
        place = (slot * KV_HEADS + head)[:, None] * WIDTH + dim[None, :]
        score = tl.dot(query, tl.load(k_pool + place).T) * scale
        score = tl.where((token < stop)[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)[:, None]
        total = total * shrink + weight
        values = tl.dot(weight.to(query.dtype), tl.load(v_pool + place), values * shrink)
        top = new_top
        token += TILE
        ids = tl.load(pages + tl.minimum(token, stop - 1) // PAGE)
    return top, tl.sum(total, 1), values


@triton.jit
def _merge(
    partials: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Writes (GROUP, WIDTH) values: `count` partial results weighted by their sums. Other programs made these: they are read past L1."""
    member = tl.arange(0, MEMBERS)
    dim = tl.arange(0, WIDTH)
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    values = tl.zeros([MEMBERS, WIDTH], tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        valid = (part < count)[:, None] & (member < GROUP)[None, :]
        place = part[:, None] * STRIDE + member[None, :]
        log_sum = tl.load(sums + place, valid, float("-inf"), cache_modifier=".cg")
        partial = tl.load(partials + place[:, :, None] * WIDTH + dim[None, None, :], valid[:, :, None], 0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        weight = tl.exp2(log_sum - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 0)
        values = values * shrink[:, None] + tl.sum(partial * weight[:, :, None], 0)
        top = new_top
    values = (values / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + member[:, None] * WIDTH + dim[None, :], values, (member < GROUP)[:, None])


@triton.jit
def _decode(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    out: tl.tensor,
    units: tl.tensor,
    pages: tl.tensor,
    partials: tl.tensor,
    sums: tl.tensor,
    arrivals: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program: one KV head with its GROUP query heads, one unit of work."""
    head = tl.program_id(0)
    unit = units + tl.program_id(1) * FIELDS
    row = tl.load(unit)
    pages += tl.load(unit + 1)
    start = tl.load(unit + 2)
    stop = tl.load(unit + 3)
    part = tl.load(unit + 4)
    first = tl.load(unit + 5)
    count = tl.load(unit + 6)
    if stop == 0:
        return
    ids = tl.load(pages + tl.minimum(start + tl.arange(0, TILE), stop - 1) // PAGE)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    member = tl.arange(0, ROWS)
    inside = (member < GROUP)[:, None]
    place = member[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    target = (row * KV_HEADS + head) * GROUP * WIDTH
    query = tl.load(q + target + place, inside, 0.0)
    top, total, values = _attend(query, k_pool, v_pool, ids, pages, head, start, stop, scale, KV_HEADS, ROWS, WIDTH, PAGE, TILE)
    values /= total[:, None]
    if count == 1:
        tl.store(out + target + place, values.to(out.dtype.element_ty), inside)
    else:
        mine = (part * KV_HEADS + head) * GROUP
        tl.store(partials + mine * WIDTH + place, values, inside)
        tl.store(sums + mine + member, top + tl.log2(total), member < GROUP)
        tl.debug_barrier()  # the whole program has written before one thread says so
        first = first * KV_HEADS + head
        if tl.atomic_add(arrivals + first, 1) == count - 1:
            tl.store(arrivals + first, 0)
            first *= GROUP
            _merge(partials + first * WIDTH, sums + first, out + target, count, KV_HEADS * GROUP, GROUP, MEMBERS, WIDTH, PARTS)


def decode_attention_(
    q_BHK: torch.Tensor,
    pool: KVPool,
    units_UF: torch.Tensor,
    pages: torch.Tensor,
    partials_UHK: torch.Tensor,
    sums_UH: torch.Tensor,
    arrivals_UG: torch.Tensor,
    out_BHK: torch.Tensor,
) -> None:
    """Writes the attention of one query token a row to `out_BHK`, as planned in `units_UF`; the grid depends on shapes alone.

    A unit is a part of a row: row, offset of the row's pages in `pages`, first token and end of the part, number of the part among all of
    them, number of the row's first part, parts of the row; a unit that ends at 0 is none. Of a row in several parts, each leaves its
    result in `partials_UHK` with its logarithmic sum (base 2) in `sums_UH`, and the one that arrives last in `arrivals_UG` (U, KV heads),
    which is zero before and after, merges them.
    """
    k_pool, v_pool = pool
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    group = q_BHK.shape[1] // kv_heads
    members = triton.next_power_of_2(group)
    assert q_BHK.is_contiguous() and out_BHK.is_contiguous() and k_pool.is_contiguous() and v_pool.is_contiguous()
    _decode[(kv_heads, len(units_UF))](
        q_BHK, k_pool, v_pool, out_BHK, units_UF, pages, partials_UHK, sums_UH, arrivals_UG, head_dim**-0.5 * math.log2(math.e),
        GROUP=group, MEMBERS=members, KV_HEADS=kv_heads, ROWS=max(MIN_DOT_ROWS, members), WIDTH=head_dim, PAGE=page_size, TILE=TILE,
        PARTS=max(1, MERGE_VALUES // (members * head_dim)), FIELDS=UNIT_FIELDS, OVERLAP=q_BHK.is_cuda,
        num_warps=WARPS, num_stages=STAGES, **launch_early(q_BHK),
    )  # fmt: skip
