"""`AttentionBackend` for rows of few query tokens, on our Triton kernel: the same in CUDA graphs and outside.

Made by `attention_cuda`, for the decode rows of any step and for the short chunks of prompts in a graph.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from models.batch import AttentionLayout
from models.layers.attention import Int32s, plan_on_device
from models.layers.kernels_attention import TILE, UNIT_FIELDS, group_tokens, split_attention_
from models.layers.kernels_text import num_multiprocessors
from models.layers.ops import KVPool

PROGRAMS = 3  # on each multiprocessor: as many as run at the same time
MIN_TILES = 2  # of a unit, if its group has them: to merge many parts takes longer than to read a few tiles


@dataclass(frozen=True, slots=True)
class Scratch:
    """What backends share whose replays follow each other on one stream: the results of groups in several parts.

    Shapes as in `split_attention_`: G query tokens at most make a group.
    """

    max_pages: int
    partials_UGHK: torch.Tensor
    sums_UGH: torch.Tensor
    arrivals_UN: torch.Tensor

    @classmethod
    def allocate(cls, pools: Sequence[KVPool], num_heads: int, max_groups: int, max_pages: int) -> "Scratch":
        """`max_pages` bounds the pages of all rows of a step together; a page that several rows share counts for each of them."""
        _, _, kv_heads, head_dim = pools[0][0].shape
        device = pools[0][0].device
        shape = max_units(max_groups, kv_heads, device), group_tokens(num_heads, kv_heads), num_heads
        return cls(
            max_pages=max_pages,
            partials_UGHK=torch.empty((*shape, head_dim), device=device),
            sums_UGH=torch.empty(shape, device=device),
            arrivals_UN=torch.zeros((shape[0], kv_heads), dtype=torch.int32, device=device),
        )


class SplitAttention:
    """See `FixedAttention`: rows of up to `max_groups` token groups.

    The query tokens of a row are cut into groups that share a reading of its keys, and the keys of a group into units of about equal
    length, so many that they fill the device: a group far into a long text is many units, one with few keys is one. A token that is not
    planned is not written.
    """

    def __init__(self, pools: Sequence[KVPool], max_groups: int, scratch: Scratch) -> None:
        self._pools = pools
        self._scratch = scratch
        k_pool = pools[0][0]
        self._kv_heads, self._device = k_pool.shape[2], k_pool.device
        self._num_units = max_units(max_groups, self._kv_heads, self._device)
        self._units_UF = torch.zeros((0, UNIT_FIELDS), dtype=torch.int32, device=self._device)
        self._pages = self._units_UF[0:0, 0]

    @classmethod
    def factory(cls, pools: Sequence[KVPool], num_heads: int, max_groups: int, max_pages: int) -> Callable[[int], "SplitAttention"]:
        """Makes backends by number of token groups, at most `max_groups`, that share their scratch memory."""
        scratch = Scratch.allocate(pools, num_heads, max_groups, max_pages)
        return lambda num_groups: cls(pools, num_groups, scratch)

    @property
    def max_pages(self) -> int:
        return self._scratch.max_pages

    def plan(self, layout: AttentionLayout) -> None:
        plan_on_device(self, layout)

    def plan_arrays(self, layout: AttentionLayout, first_page: int = 0) -> tuple[Int32s]:
        """The units (U, UNIT_FIELDS), as many as `max_groups` may need. The layout's pages begin at `first_page` of those that are read."""
        assert first_page + len(layout.pages) <= self.max_pages, f"{len(layout.pages)} pages are more than {self.max_pages}"
        groups = token_groups(layout, self._scratch.partials_UGHK.shape[1])
        groups[:, 2] += first_page
        units = np.zeros((self._num_units, UNIT_FIELDS), dtype=np.int32)
        planned = plan_units(groups, max_units(len(groups), self._kv_heads, self._device))
        units[: len(planned)] = planned
        return (units,)

    def read_from(self, plan: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
        (self._units_UF,) = plan
        self._pages = pages

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        out_THK = torch.empty_like(q_THK)
        self.run_into(layer, q_THK, out_THK)
        return out_THK

    def run_into(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor) -> None:
        """As `run`, for a result whose place is known."""
        scratch = self._scratch
        buffers = self._pages, scratch.partials_UGHK, scratch.sums_UGH, scratch.arrivals_UN
        split_attention_(q_THK, self._pools[layer], self._units_UF, *buffers, out_THK)


def max_token_groups(num_tokens: int, num_rows: int, size: int) -> int:
    """So many groups of up to `size` tokens are enough for `num_tokens` in `num_rows` rows, however they are spread."""
    return min(num_tokens, (num_tokens + num_rows * (size - 1)) // size)


def max_units(num_groups: int, kv_heads: int, device: torch.device) -> int:
    """So many that they fill the device, and a few more than groups, so that there is room to cut the longest ones."""
    return max(-(-PROGRAMS * num_multiprocessors(device) // kv_heads), num_groups + num_groups // 2 + 1)


def token_groups(layout: AttentionLayout, size: int) -> Int32s:
    """(G, 4): first query token, number of query tokens, offset of the row's pages, end of the last token's keys. Row after row.

    Each row's query tokens in groups of `size` and a rest; a row without has none.
    """
    first_tokens, kv_lens = layout.qo_indptr_cpu.numpy(), layout.kv_lens_cpu.numpy()
    num_tokens = first_tokens[1:] - first_tokens[:-1]
    counts = -(-num_tokens // size)
    row = np.repeat(np.arange(len(counts)), counts)
    before = (np.arange(len(row)) - (np.cumsum(counts) - counts)[row]) * size  # of the row's tokens, those in earlier groups
    rest = num_tokens[row] - before
    tokens = np.minimum(rest, size)
    end = kv_lens[row] - rest + tokens
    return np.stack((first_tokens[row] + before, tokens, layout.page_indptr_cpu.numpy()[row], end), axis=1).astype(np.int32)


def plan_units(groups: Int32s, limit: int) -> Int32s:
    """At most `limit` units (U, 8) as in `split_attention_`, longest first. There must be more units than `token_groups`.

    No unit is longer than MIN_TILES or is needed to stay within the limit, and those of a group are equal up to a tile. The shortest
    length in tiles that stays within the limit lies between sum / limit and (sum - groups) / (limit - groups), as t tiles are at most
    (t - 1) / length + 1 units. The last of several units is never shorter than the others, so it has more than a tile: its first tile
    holds keys of every token.
    """
    num_groups, end = len(groups), groups[:, 3]
    tiles = -(-end // TILE)
    total = int(tiles.sum())
    low, high = -(-total // limit), max(1, -(-(total - num_groups) // (limit - num_groups)))
    length = low + bisect_left(range(low, high), True, key=lambda size: int((-(-tiles // size)).sum()) <= limit)
    counts = -(-tiles // max(length, MIN_TILES))
    group = np.repeat(np.arange(num_groups), counts)
    first = (np.cumsum(counts) - counts)[group]
    index = np.arange(len(group))
    part, parts, group_tiles = index - first, counts[group], tiles[group]
    start, stop = part * group_tiles // parts * TILE, np.minimum((part + 1) * group_tiles // parts * TILE, end[group])
    parts_UF = np.stack((start, stop, index, first, parts), axis=1).astype(np.int32)
    units_UF = np.concatenate((groups[group, :3], parts_UF), axis=1)
    return units_UF[np.argsort(start - stop, kind="stable")]
