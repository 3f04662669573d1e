"""Causal attention over paged keys and values in Triton: a program computes a work item of `models.kernels.work_items`; a second kernel
merges the parts of a group."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.cache.layout import AttentionLayout
from models.kernels.heads import MAX_GROUP
from models.kernels.ops import KVPool
from models.kernels.paged import EagerAttention, Int32s, MakeFixed, PagedAttention, Piece
from models.kernels.triton.launch import await_previous_kernel, cdiv, kernel, num_multiprocessors
from models.kernels.triton.tuned import AttentionTiles
from models.kernels.work_items import WORK_ITEM_FIELDS, max_work_items, padded, plan_work_items, token_groups

MAX_SPLIT_TOKENS = 64  # up to so many prompt tokens of a step use split-KV, as decode rows do
COPIED = 4096  # values that a program of `_copy` copies
LOG2_E = 1.4426950408889634


@triton.jit
def _scores_update(
    q: tensor, k: tensor, v: tensor, keep: tensor, largest: tensor, total: tensor, out: tensor, scale: tensor, MASKED: constexpr,
    EXACT: constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Online softmax in powers of two."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else None) * scale
    if MASKED:
        scores = tl.where(keep, scores, -float("inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee" if EXACT else None)
    return new_largest, total, out


@kernel()
def _attend(
    q: tensor, k: tensor, v: tensor, out: tensor, items: tensor, pages: tensor, partials: tensor, sums: tensor, scale: tensor,
    FIELDS: constexpr, KV_HEADS: constexpr, GROUP: constexpr, PAGE: constexpr, DIM: constexpr, ROWS: constexpr, KEYS: constexpr,
    STAGES: constexpr, EXACT: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (u, h): item u for KV head h. Row m of a tile is query token m // GROUP and query head m % GROUP of the KV head. Causal mask:
    the last key of a group belongs to its last token only, the one before to the last two, and so on."""
    item = items + tl.program_id(0).to(tl.int64) * FIELDS
    await_previous_kernel(OVERLAP)
    stop = tl.load(item + 4)
    if stop == 0:
        return
    first, num_tokens, page_offset, start = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    number, first_part, parts = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    kv_head = tl.program_id(1)
    row, dim, key = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, KEYS)
    token = row // GROUP
    inside = token < num_tokens
    place = ((first + token).to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP + row % GROUP)[:, None] * DIM + dim[None, :]
    queries = tl.load(q + place, inside[:, None], 0.0)
    is_last = number - first_part == parts - 1
    end = tl.where(is_last & inside, stop - (num_tokens - 1 - token), stop)  # of each row's keys
    whole = tl.where(is_last, tl.maximum(stop - (num_tokens - 1), start), stop)  # up to here every row attends to every key
    whole = start + (whole - start) // KEYS * KEYS
    largest = tl.full((ROWS,), -1e30, tl.float32)  # finite: a row without a key in the first tile must not become NaN
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, DIM), tl.float32)
    for at in tl.range(start, whole, KEYS, num_stages=STAGES):
        index = at + key
        slot = tl.load(pages + page_offset + index // PAGE).to(tl.int64) * PAGE + index % PAGE
        cached = (slot * KV_HEADS + kv_head)[:, None] * DIM + dim[None, :]
        keys, values = tl.load(k + cached).to(queries.dtype), tl.load(v + cached).to(queries.dtype)
        largest, total, result = _scores_update(queries, keys, values, end[:, None] > 0, largest, total, result, scale, False, EXACT)
    for at in tl.range(whole, stop, KEYS, num_stages=1):
        index = at + key
        slot = tl.load(pages + page_offset + index // PAGE, index < stop, 0).to(tl.int64) * PAGE + index % PAGE
        cached = (slot * KV_HEADS + kv_head)[:, None] * DIM + dim[None, :]
        there = (index < stop)[:, None]
        largest, total, result = _scores_update(
            queries, tl.load(k + cached, there, 0.0).to(queries.dtype), tl.load(v + cached, there, 0.0).to(queries.dtype),
            index[None, :] < end[:, None], largest, total, result, scale, True, EXACT,
        )  # fmt: skip
    result = result / total[:, None]
    if parts == 1:
        tl.store(out + place, result.to(out.dtype.element_ty), inside[:, None])
    else:
        line = (number.to(tl.int64) * KV_HEADS + kv_head) * ROWS + row
        tl.store(partials + line[:, None] * DIM + dim[None, :], result)
        tl.store(sums + line, largest + tl.log2(total))


@kernel()
def _merge(
    out: tensor, items: tensor, partials: tensor, sums: tensor, FIELDS: constexpr, KV_HEADS: constexpr, GROUP: constexpr, DIM: constexpr,
    ROWS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (u, h): if item u is the first of several parts, store their weighted mean."""
    item = items + tl.program_id(0).to(tl.int64) * FIELDS
    await_previous_kernel(OVERLAP)
    first, num_tokens, stop = tl.load(item), tl.load(item + 1), tl.load(item + 4)
    number, first_part, parts = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    if (stop == 0) | (number != first_part) | (parts == 1):
        return
    kv_head = tl.program_id(1)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    largest, total = tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, DIM), tl.float32)
    for part in range(0, parts):
        line = ((first_part + part).to(tl.int64) * KV_HEADS + kv_head) * ROWS + row
        weight = tl.load(sums + line)
        new_largest = tl.maximum(largest, weight)
        shrink, share = tl.exp2(largest - new_largest), tl.exp2(weight - new_largest)
        result = result * shrink[:, None] + tl.load(partials + line[:, None] * DIM + dim[None, :]) * share[:, None]
        total, largest = total * shrink + share, new_largest
    token = row // GROUP
    place = ((first + token).to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP + row % GROUP)[:, None] * DIM + dim[None, :]
    tl.store(out + place, (result / total[:, None]).to(out.dtype.element_ty), (token < num_tokens)[:, None])


@kernel()
def _copy(
    k: tensor, v: tensor, k_copy: tensor, v_copy: tensor, pages: tensor, SIZE: constexpr, BLOCK: constexpr, OVERLAP: constexpr
) -> None:  # fmt: skip
    """Program (i, j, w): the j-th BLOCK keys (w = 0) or values (1) of the i-th page."""
    page, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, target = k, k_copy
    if tl.program_id(2) == 1:
        source, target = v, v_copy
    inside = place < SIZE
    await_previous_kernel(OVERLAP)
    values = tl.load(source + tl.load(pages + page).to(tl.int64) * SIZE + place, inside)
    tl.store(target + page * SIZE + place, values.to(target.dtype.element_ty), inside)


def copy_pages(pool: KVPool, copies: KVPool, pages: torch.Tensor) -> None:
    """Copy these pages of keys and values to the first ones of `copies`, in their type."""
    size = pool[0][0].numel()
    _copy[(len(pages), cdiv(size, COPIED), 2)](*pool, *copies, pages, SIZE=size, BLOCK=COPIED, num_warps=4)


class PagedKernel:
    """The kernels for these pools, with scratch memory that pieces share on one stream: results of groups in several parts."""

    def __init__(self, pools: Sequence[KVPool], num_heads: int, tiles: AttentionTiles) -> None:
        self.pools, self.tiles, k_pool = pools, tiles, pools[0][0]
        _, self.page_size, self.kv_heads, self.head_dim = k_pool.shape
        self.group = num_heads // self.kv_heads
        assert num_heads % self.kv_heads == 0 and self.group <= MAX_GROUP
        self.few_tokens, self.chunk_tokens = tiles.few.rows // self.group, tiles.chunk.rows // self.group
        self._num_blocks, self._scale = tiles.blocks * num_multiprocessors(k_pool.device), self.head_dim**-0.5 * LOG2_E
        self._grow(0)

    def num_items(self, num_groups: int) -> int:
        """Return the number of work items for so many groups of few tokens."""
        return max_work_items(num_groups, self.kv_heads, self._num_blocks)

    def reserve(self, num_items: int) -> None:
        """Allocate scratch memory for so many work items; call before any capture."""
        if num_items > len(self.sums):
            self._grow(num_items)

    def _grow(self, num_items: int) -> None:
        shape, device = (num_items, self.kv_heads, self.tiles.few.rows), self.pools[0][0].device
        self.partials = torch.empty((*shape, self.head_dim), device=device)  # float32
        self.sums = torch.empty(shape, device=device)  # logarithms (base 2) of the parts' sums

    def attend(
        self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor, items: torch.Tensor, pages: torch.Tensor, is_few: bool
    ) -> None:
        """Compute items of few tokens, whose parts are merged, or whole ones of chunks."""
        assert q_THK.is_contiguous()
        tiles, grid = self.tiles.few if is_few else self.tiles.chunk, (len(items), self.kv_heads)
        sizes = {"FIELDS": WORK_ITEM_FIELDS, "KV_HEADS": self.kv_heads, "GROUP": self.group, "DIM": q_THK.shape[2], "ROWS": tiles.rows}
        _attend[grid](
            q_THK, *self.pools[layer], out_THK, items, pages, self.partials, self.sums, self._scale, PAGE=self.page_size,
            KEYS=tiles.keys, STAGES=tiles.stages, EXACT=q_THK.dtype == torch.float32, num_warps=tiles.warps, **sizes,
        )  # fmt: skip
        if is_few:
            _merge[grid](out_THK, items, self.partials, self.sums, num_warps=4, **sizes)


class Chunks:
    """See `Piece`: the prefill rows, each group of tokens a whole work item."""

    def __init__(self, of: PagedKernel) -> None:
        self._of = of

    def plan(self, layout: AttentionLayout, before: Sequence[Int32s]) -> Int32s:
        """Return the work items, longest first."""
        groups = token_groups(layout.prefill_rows(), self._of.chunk_tokens)
        number = np.arange(len(groups), dtype=np.int32)
        zeros, ones = np.zeros_like(number), np.ones_like(number)
        items = np.stack((*groups[:, :3].T, zeros, groups[:, 3], number, number, ones), axis=1)
        return items[np.argsort(-groups[:, 3], kind="stable")]

    def launch(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor, plan: torch.Tensor, pages: torch.Tensor) -> None:
        self._of.attend(layer, q_THK, out_THK, plan, pages, is_few=False)


class FewTokens:
    """See `Piece`: rows that are cut along their keys; all of them, or those after `num_prefill` tokens of prompts. With `num_items` the
    plan has one size."""

    def __init__(self, of: PagedKernel, num_prefill: int, num_items: int = 0) -> None:
        self._of, self._num_prefill, self._num_items = of, num_prefill, num_items

    def plan(self, layout: AttentionLayout, before: Sequence[Int32s]) -> Int32s:
        """Return the work items, longest first."""
        groups = token_groups(layout.decode_rows() if self._num_prefill else layout, self._of.few_tokens)
        if self._num_prefill:  # its tokens and pages follow those of the prompts
            groups[:, 0] += self._num_prefill
            groups[:, 2] += int(layout.page_indptr_cpu[layout.num_prefill_rows])
        return padded(plan_work_items(groups, self._of.num_items(len(groups))), self._num_items)

    def launch(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor, plan: torch.Tensor, pages: torch.Tensor) -> None:
        if len(plan):
            self._of.reserve(len(plan))
            self._of.attend(layer, q_THK, out_THK, plan, pages, is_few=True)


def eager_attention(pools: Sequence[KVPool], num_heads: int, tiles: AttentionTiles) -> EagerAttention:
    """Return attention for any mix of rows, outside CUDA graphs."""
    kernel = PagedKernel(pools, num_heads, tiles)

    def choose(layout: AttentionLayout) -> Sequence[Piece]:
        num_prefill = int(layout.qo_indptr_cpu[layout.num_prefill_rows])
        return [FewTokens(kernel, 0)] if num_prefill <= MAX_SPLIT_TOKENS else [Chunks(kernel), FewTokens(kernel, num_prefill)]

    return EagerAttention(pools, choose)


def fixed_attention_factory(pools: Sequence[KVPool], num_heads: int, tiles: AttentionTiles, max_rows: int, max_blocks: int) -> MakeFixed:
    """See `Backend.fixed_attention`."""
    kernel = PagedKernel(pools, num_heads, tiles)
    kernel.reserve(kernel.num_items(max_rows))

    def make(num_rows: int) -> PagedAttention:
        return PagedAttention(pools, [FewTokens(kernel, 0, kernel.num_items(num_rows))], max_rows * max_blocks)

    return make
