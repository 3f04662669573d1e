"""Host-side partition of paged attention into work items: query tokens are grouped to share loads of their keys, and for few
tokens (flash-decoding) keys are split into parts."""

from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt

from models.cache.layout import AttentionLayout
from models.kernels.paged import Int32s

WORK_ITEM_FIELDS = 8  # a work item is one aligned piece of memory; one that ends at 0 is empty
ROWS = 16  # rows of a matrix product: query tokens times the query heads of a KV head
TILE = 32  # keys; work items begin at multiples of it
MAX_PARTS = 512  # maximum parts of a group: all are held during the merge
MIN_TILES = 3  # minimum size of a work item, unless its group is smaller: merging parts costs more than reading a few tiles


def group_tokens(num_heads: int, kv_heads: int) -> int:
    """Return the query tokens that share loads of keys: their heads fill the rows of a matrix product."""
    return ROWS // (num_heads // kv_heads)


def max_token_groups(num_tokens: int, num_rows: int, size: int) -> int:
    """Return an upper bound of groups of up to `size` tokens for `num_tokens` in `num_rows` rows."""
    return min(num_tokens, (num_tokens + num_rows * (size - 1)) // size)


def max_work_items(num_groups: int, kv_heads: int, num_blocks: int) -> int:
    """Return an upper bound of work items: enough to fill `num_blocks` concurrent blocks of one KV head each, and more than groups, so that
    the longest can be split."""
    return max(-(-num_blocks // kv_heads), num_groups + num_groups // 2 + 1)


def token_groups(layout: AttentionLayout, size: int) -> Int32s:
    """Return (G, 4): first query token, number of query tokens (`size` or the rest), the row's first page, end of the last token's keys."""
    first_tokens = layout.qo_indptr_cpu.numpy()
    num_tokens = first_tokens[1:] - first_tokens[:-1]
    row, before, tokens = cut(num_tokens, size)
    end = (layout.kv_lens_cpu.numpy() - num_tokens)[row] + before + tokens
    return np.stack((first_tokens[row] + before, tokens, layout.page_indptr_cpu.numpy()[row], end), axis=1).astype(np.int32)


def cut(lengths: npt.NDArray[Any], size: int) -> tuple[npt.NDArray[Any], ...]:
    """Cut rows into pieces of `size` or the rest: return each piece's row, offset in the row, and length."""
    counts = -(-lengths // size)
    row = np.repeat(np.arange(len(counts)), counts)
    before = (np.arange(len(row)) - (counts.cumsum() - counts)[row]) * size
    return row, before, np.minimum(lengths[row] - before, size)


def padded(items: Int32s, size: int) -> Int32s:
    """Pad to `size` work items with empty ones."""
    return np.concatenate((items, np.zeros((max(0, size - len(items)), WORK_ITEM_FIELDS), dtype=np.int32)))


def plan_work_items(groups: Int32s, limit: int) -> Int32s:
    """Return at most `limit` work items (W, WORK_ITEM_FIELDS), longest first, at most MAX_PARTS per group. `limit` must exceed the
    number of groups.

    An item is a part of a group's keys: first query token, number of query tokens, offset of the row's pages, first key, end, number of the
    part among all, number of the group's first part, parts of the group.

    Items are as short as the limit and MIN_TILES allow; those of a group are equal up to a tile. The shortest length in tiles lies between
    sum / limit and (sum - groups) / (limit - groups), as t tiles are at most (t - 1) / length + 1 items. The last of several items is never
    shorter than the others: each token of the group has keys in every part.
    """
    num_groups, end = len(groups), groups[:, 3]
    limit = min(limit, num_groups + MAX_PARTS - 1)
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
    parts_WF = np.stack((start, stop, index, first, parts), axis=1).astype(np.int32)
    items_WF = np.concatenate((groups[group, :3], parts_WF), axis=1)
    return items_WF[np.argsort(start - stop, kind="stable")]
