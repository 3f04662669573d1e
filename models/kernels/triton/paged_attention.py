"""Causal attention over paged keys and values in Triton: a program computes a unit of `models.kernels.units`; a second kernel merges the
parts of a group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.cache.layout import AttentionLayout
from models.kernels.heads import MAX_GROUP
from models.kernels.ops import KVPool
from models.kernels.paged import FixedAttention, Int32s, MakeFixed, plan_on_device
from models.kernels.triton.launch import await_kernel_ahead, early_launch, num_multiprocessors
from models.kernels.triton.tuned import AttentionTiles, Tiles
from models.kernels.units import UNIT_FIELDS, max_token_groups, max_units, plan_units, token_groups

MAX_SPLIT_TOKENS = 64  # of prompts in a step: so few are cut along their keys, as decode rows are
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


@triton.jit
def _attend(
    q: tensor, k: tensor, v: tensor, out: tensor, units: tensor, pages: tensor, partials: tensor, sums: tensor, scale: tensor,
    FIELDS: constexpr, KV_HEADS: constexpr, GROUP: constexpr, PAGE: constexpr, DIM: constexpr, ROWS: constexpr, KEYS: constexpr,
    STAGES: constexpr, EXACT: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (u, h): unit u for KV head h. Row m of a tile is query token m // GROUP and query head m % GROUP of the KV head's. The last
    key of a group is its last token's alone, and so on."""
    unit = units + tl.program_id(0).to(tl.int64) * FIELDS
    await_kernel_ahead(OVERLAP)
    stop = tl.load(unit + 4)
    if stop == 0:
        return
    first, num_tokens, page_offset, start = tl.load(unit), tl.load(unit + 1), tl.load(unit + 2), tl.load(unit + 3)
    number, first_part, parts = tl.load(unit + 5), tl.load(unit + 6), tl.load(unit + 7)
    kv_head = tl.program_id(1)
    row, dim, key = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, KEYS)
    token = row // GROUP
    inside = token < num_tokens
    place = ((first + token).to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP + row % GROUP)[:, None] * DIM + dim[None, :]
    queries = tl.load(q + place, inside[:, None], 0.0)
    is_last = number - first_part == parts - 1
    end = tl.where(is_last & inside, stop - (num_tokens - 1 - token), stop)  # of each row's keys
    whole = tl.where(is_last, tl.maximum(stop - (num_tokens - 1), start), stop)  # up to here every row takes every key
    whole = start + (whole - start) // KEYS * KEYS
    largest = tl.full((ROWS,), -1e30, tl.float32)  # finite: a row without a key in the first tile must not become NaN
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, DIM), tl.float32)
    for at in tl.range(start, whole, KEYS, num_stages=STAGES):
        index = at + key
        slot = tl.load(pages + page_offset + index // PAGE).to(tl.int64) * PAGE + index % PAGE
        cached = (slot * KV_HEADS + kv_head)[:, None] * DIM + dim[None, :]
        largest, total, result = _scores_update(
            queries, tl.load(k + cached), tl.load(v + cached), end[:, None] > 0, largest, total, result, scale, False, EXACT
        )
    for at in tl.range(whole, stop, KEYS, num_stages=1):
        index = at + key
        slot = tl.load(pages + page_offset + index // PAGE, index < stop, 0).to(tl.int64) * PAGE + index % PAGE
        cached = (slot * KV_HEADS + kv_head)[:, None] * DIM + dim[None, :]
        there = (index < stop)[:, None]
        largest, total, result = _scores_update(
            queries, tl.load(k + cached, there, 0.0), tl.load(v + cached, there, 0.0),
            index[None, :] < end[:, None], largest, total, result, scale, True, EXACT,
        )  # fmt: skip
    result = result / total[:, None]
    if parts == 1:
        tl.store(out + place, result.to(out.dtype.element_ty), inside[:, None])
    else:
        line = (number.to(tl.int64) * KV_HEADS + kv_head) * ROWS + row
        tl.store(partials + line[:, None] * DIM + dim[None, :], result)
        tl.store(sums + line, largest + tl.log2(total))


@triton.jit
def _merge(
    out: tensor, units: tensor, partials: tensor, sums: tensor, FIELDS: constexpr, KV_HEADS: constexpr, GROUP: constexpr, DIM: constexpr,
    ROWS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (u, h): if unit u is the first part of several, their weighted mean."""
    unit = units + tl.program_id(0).to(tl.int64) * FIELDS
    await_kernel_ahead(OVERLAP)
    first, num_tokens, stop = tl.load(unit), tl.load(unit + 1), tl.load(unit + 4)
    number, first_part, parts = tl.load(unit + 5), tl.load(unit + 6), tl.load(unit + 7)
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


@dataclass(frozen=True, slots=True)
class Scratch:
    """Results of groups in several parts, shared on one stream."""

    partials: torch.Tensor  # (units, KV heads, rows, K) float32
    sums: torch.Tensor  # (units, KV heads, rows) float32: logarithms (base 2) of the parts' sums
    max_pages: int

    @classmethod
    def allocate(cls, pool: KVPool, num_units: int, rows: int, max_pages: int) -> "Scratch":
        _, _, kv_heads, head_dim = pool[0].shape
        shape = num_units, kv_heads, rows
        return cls(torch.empty((*shape, head_dim), device=pool[0].device), torch.empty(shape, device=pool[0].device), max_pages)


class PagedAttention:
    """See `AttentionBackend`, and `FixedAttention` if `num_chunks` and `num_units` say how many of each a plan may have.

    Chunks of prompts are whole units; decode rows, and few tokens of prompts, are cut along their keys.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        num_heads: int,
        tiles: AttentionTiles,
        scratch: Scratch | None = None,
        num_chunks: int | None = None,
        num_units: int | None = None,
    ) -> None:
        k_pool = pools[0][0]
        _, self._page_size, self._kv_heads, head_dim = k_pool.shape
        self._group = num_heads // self._kv_heads
        assert num_heads % self._kv_heads == 0 and self._group <= MAX_GROUP
        self._pools = pools
        self._tiles = tiles
        self._scratch = scratch
        self._num_chunks, self._num_units = num_chunks, num_units
        self._limit = tiles.blocks * num_multiprocessors(k_pool.device)
        self._scale = head_dim**-0.5 * LOG2_E
        self._chunks = self._units = torch.zeros((0, UNIT_FIELDS), dtype=torch.int32, device=k_pool.device)
        self._pages = self._units[:, 0]

    @property
    def max_pages(self) -> int:
        assert self._scratch is not None
        return self._scratch.max_pages

    def plan(self, layout: AttentionLayout) -> None:
        plan_on_device(self, layout)

    def plan_arrays(self, layout: AttentionLayout) -> tuple[Int32s, ...]:
        """Units of chunks, longest first, then units of few tokens."""
        num_prefill = int(layout.qo_indptr_cpu[layout.num_prefill_rows])
        few = layout if num_prefill <= MAX_SPLIT_TOKENS else layout.decode_rows()
        chunks = np.zeros((0, UNIT_FIELDS), dtype=np.int32)
        if num_prefill > MAX_SPLIT_TOKENS:
            chunks = _whole_units(token_groups(layout.prefill_rows(), self._tiles.chunk.rows // self._group))
        groups = token_groups(few, self._tiles.few.rows // self._group)
        if few is not layout:  # its tokens and pages lie behind those of the prompts
            groups[:, 0] += num_prefill
            groups[:, 2] += int(layout.page_indptr_cpu[layout.num_prefill_rows])
        units = chunks[:0]
        if len(groups):
            limit = max_units(len(groups), self._kv_heads, self._limit)
            units = plan_units(groups, limit if self._num_units is None else min(limit, self._num_units))
        return _padded(chunks, self._num_chunks), _padded(units, self._num_units)

    def read_from(self, plan: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
        self._chunks, self._units = plan
        self._pages = pages
        if self._num_units is None and (self._scratch is None or len(self._scratch.sums) < len(self._units)):
            self._scratch = Scratch.allocate(self._pools[0], len(self._units), self._tiles.few.rows, 0)

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        assert q_THK.is_contiguous()
        out_THK = torch.empty_like(q_THK)
        if len(self._chunks):
            self._attend(layer, q_THK, out_THK, self._chunks, self._tiles.chunk)
        if len(self._units):
            self._attend(layer, q_THK, out_THK, self._units, self._tiles.few)
            self._merge(out_THK)
        return out_THK

    def _attend(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor, units: torch.Tensor, tiles: Tiles) -> None:
        k_pool, v_pool = self._pools[layer]
        assert self._scratch is not None
        _attend[(len(units), self._kv_heads)](
            q_THK, k_pool, v_pool, out_THK, units, self._pages, self._scratch.partials, self._scratch.sums, self._scale,
            FIELDS=UNIT_FIELDS, KV_HEADS=self._kv_heads, GROUP=self._group, PAGE=self._page_size, DIM=q_THK.shape[2],
            ROWS=tiles.rows, KEYS=tiles.keys, STAGES=tiles.stages, EXACT=q_THK.dtype == torch.float32, num_warps=tiles.warps,
            **early_launch(q_THK),
        )  # fmt: skip

    def _merge(self, out_THK: torch.Tensor) -> None:
        assert self._scratch is not None
        _merge[(len(self._units), self._kv_heads)](
            out_THK, self._units, self._scratch.partials, self._scratch.sums,
            FIELDS=UNIT_FIELDS, KV_HEADS=self._kv_heads, GROUP=self._group, DIM=out_THK.shape[2], ROWS=self._tiles.few.rows, num_warps=4,
            **early_launch(out_THK),
        )  # fmt: skip


def fixed_attention_factory(
    pools: Sequence[KVPool], num_heads: int, tiles: AttentionTiles, max_prefill_rows: int, max_decode_rows: int, max_blocks: int
) -> MakeFixed:
    """See `Backend.fixed_attention`."""
    kv_heads = pools[0][0].shape[2]
    group = num_heads // kv_heads
    limit = tiles.blocks * num_multiprocessors(pools[0][0].device)
    few_tokens, chunk_tokens = tiles.few.rows // group, tiles.chunk.rows // group
    max_groups = max_decode_rows + max_token_groups(MAX_SPLIT_TOKENS, max_prefill_rows, few_tokens)
    num_units = max_units(max_groups, kv_heads, limit)
    scratch = Scratch.allocate(pools[0], num_units, tiles.few.rows, (max_prefill_rows + max_decode_rows) * max_blocks)

    def make(num_tokens: int, num_decodes: int, num_rows: int) -> FixedAttention:
        is_few = num_tokens <= MAX_SPLIT_TOKENS
        groups = num_decodes + (max_token_groups(num_tokens, num_rows, few_tokens) if is_few else 0)
        num_chunks = 0 if is_few else max_token_groups(num_tokens, num_rows, chunk_tokens)
        return PagedAttention(pools, num_heads, tiles, scratch, num_chunks, max_units(groups, kv_heads, limit) if groups else 0)

    return make


def _whole_units(groups: Int32s) -> Int32s:
    """Each group a unit, longest first."""
    number = np.arange(len(groups), dtype=np.int32)
    zeros, ones = np.zeros_like(number), np.ones_like(number)
    units = np.stack((*groups[:, :3].T, zeros, groups[:, 3], number, number, ones), axis=1)
    return units[np.argsort(-groups[:, 3], kind="stable")]


def _padded(units: Int32s, size: int | None) -> Int32s:
    if size is None:
        return units
    padded = np.zeros((size, UNIT_FIELDS), dtype=np.int32)
    padded[: len(units)] = units
    return padded
