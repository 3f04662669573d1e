"""The Triton kernel of attention of few query tokens over paged keys and values. Called by `split_attention`.

Bound by memory: every cached key and value is read once for as many query tokens as fill the rows of a matrix product. Products are of the
pool's type, everything else is float32. Tests run it in Triton's interpreter.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.layers.compile_cuda import load_kernel
from models.layers.ops import KVPool

TILE = 32  # tokens at once
STAGES = 4  # tiles under way, and the one that is worked on
WARPS = 2
UNIT_FIELDS = 8  # a unit is one aligned piece of memory
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
    ends: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Softmax over tokens `start : stop`, in row i those before `ends[i]`, of which one is in the first tile: maximum (base 2), sum and
    weighted values. `ids` are the pages of the first tile's tokens.

    Tokens behind `stop` are the last one again, so that loads need no mask; their weight is zero. Page ids are a tile ahead of the keys.
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
        score = tl.where(token[None, :] < ends[:, None], score, float("-inf"))
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
def _run_unit(
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
    """One program: one KV head with its GROUP query heads, one unit of work. Its query tokens have MEMBERS rows of the products each."""
    head = tl.program_id(0)
    unit = units + tl.program_id(1) * FIELDS
    first_token, num_tokens = tl.load(unit), tl.load(unit + 1)
    pages += tl.load(unit + 2)
    start, stop = tl.load(unit + 3), tl.load(unit + 4)
    part, first, count = tl.load(unit + 5), tl.load(unit + 6), tl.load(unit + 7)
    if stop == 0:
        return
    ids = tl.load(pages + tl.minimum(start + tl.arange(0, TILE), stop - 1) // PAGE)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    TOKEN: tl.constexpr = KV_HEADS * GROUP  # from a token to the next, in heads
    token, member = tl.arange(0, ROWS) // MEMBERS, tl.arange(0, ROWS) % MEMBERS
    inside = (token < num_tokens) & (member < GROUP)
    vector = token * TOKEN + member
    place = vector[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    target = (first_token * KV_HEADS + head) * GROUP * WIDTH
    query = tl.load(q + target + place, inside[:, None], 0.0)
    ends = stop + tl.where(part == first + count - 1, token + 1 - num_tokens, 0)
    top, total, values = _attend(query, k_pool, v_pool, ids, pages, head, start, stop, ends, scale, KV_HEADS, ROWS, WIDTH, PAGE, TILE)
    values /= total[:, None]
    if count == 1:
        tl.store(out + target + place, values.to(out.dtype.element_ty), inside[:, None])
    else:
        STRIDE: tl.constexpr = ROWS // MEMBERS * TOKEN  # from a part to the next, in heads
        mine = part * STRIDE + head * GROUP
        tl.store(partials + mine * WIDTH + place, values, inside[:, None])
        tl.store(sums + mine + vector, top + tl.log2(total), inside)
        tl.debug_barrier()  # the whole program has written before one thread says so
        arrivals += first * KV_HEADS + head
        if tl.atomic_add(arrivals, 1) == count - 1:
            tl.store(arrivals, 0)
            first = first * STRIDE + head * GROUP
            for i in range(num_tokens):
                mine = first + i * TOKEN
                _merge(partials + mine * WIDTH, sums + mine, out + target + i * TOKEN * WIDTH, count, STRIDE, GROUP, MEMBERS, WIDTH, PARTS)


def group_tokens(num_heads: int, kv_heads: int) -> int:
    """Query tokens that share a reading of the keys: so many that their heads fill the rows of a matrix product."""
    return max(1, MIN_DOT_ROWS // triton.next_power_of_2(num_heads // kv_heads))


def split_attention_(
    q_THK: torch.Tensor,
    pool: KVPool,
    units_UF: torch.Tensor,
    pages: torch.Tensor,
    partials_UGHK: torch.Tensor,
    sums_UGH: torch.Tensor,
    arrivals_UN: torch.Tensor,
    out_THK: torch.Tensor,
) -> None:
    """Writes the attention of query tokens to `out_THK`, as planned in `units_UF`; the grid depends on shapes alone.

    Up to G = `group_tokens` neighbouring query tokens of a row are a group, whose keys are cut into parts. A unit is a part: first query
    token, number of query tokens, offset of the row's pages in `pages`, first key and end of the part, number of the part among all of
    them, number of the group's first part, parts of the group; a unit that ends at 0 is none. The last key of a group is its last token's
    alone, the one before belongs to the last two, and so on: each token must have a key in the first TILE of every part. Of a group in
    several parts, each leaves its results in `partials_UGHK` with their logarithmic sums (base 2) in `sums_UGH`, and the one that arrives
    last in `arrivals_UN` (U, KV heads), which is zero before and after, merges them.
    """
    k_pool, v_pool = pool
    page_size, _, head_dim = k_pool.shape[1:]
    keys, values = k_pool.flatten(0, 1), v_pool.flatten(0, 1)
    load_kernel("split_attention", head_dim).run(
        q_THK, keys, values, out_THK, units_UF, pages, partials_UGHK, sums_UGH, arrivals_UN, page_size, head_dim**-0.5
    )
