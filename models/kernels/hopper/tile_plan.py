"""Tile scheduler of `hopper_attention.cuh`: tiles of queries are assigned to blocks in rounds; those of the last round are split along the
keys, so that no block idles."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.kernels.hopper.tuned import TILES_TO_MERGE, TILES_TO_START
from models.kernels.paged import Int32s

Ints = npt.NDArray[np.int64]

ITEM_FIELDS = 12  # int32: three aligned pieces of 16 bytes
MAX_ROUNDS = 4  # maximum rounds that splitting adds to a block


def part_memory(kernel: Any, num_blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for partial results, shared by kernels on one stream, and their arrivals, which are zero before and after."""
    count = 2 * num_blocks  # upper bound: one cut at the end of each share and of each item
    parts = torch.empty((count, kernel.part_floats()), device=device)
    return parts, torch.zeros((count, kernel.part_arrivals()), dtype=torch.int32, device=device)


def plan_items(tiles: Int32s, num_heads: int, tile_keys: int, num_blocks: int) -> Int32s:
    """Return (1 + n, ITEM_FIELDS): a header that begins with n and `num_blocks`, then n items. Block b computes items b, b + num_blocks and
    so on.

    `tiles` (t, 4) are those of each head: first token, number of tokens, start of the keys, end of the last token's keys. The fields of an
    item are these four, its head, first and end of its tiles of `tile_keys` keys, 0, number of its tile's first part, its index among the
    parts, and their number. An item that ends at 0 is empty; its block has no further ones.

    The cost of an item is its number of key tiles. Complete rounds are assigned by descending cost in alternating direction; the last round
    is cut by `cut_round`."""
    number, head = np.tile(np.arange(len(tiles)), num_heads), np.repeat(np.arange(num_heads), len(tiles))
    costs = -(-tiles[number, 3] // tile_keys)
    order = np.lexsort((head, -tiles[number, 1], -costs))  # neighbouring items share keys
    order = order[assign_tiles(len(order), num_blocks)]
    num_whole = len(order) // num_blocks * num_blocks
    rest = cut_round(costs[order[num_whole:]], num_blocks)
    order = np.concatenate((order[:num_whole], order[num_whole:][rest[:, 0]]))
    items = np.zeros((1 + len(order), ITEM_FIELDS), dtype=np.int32)
    items[0, :2] = len(order), num_blocks
    items[1:, :4], items[1:, 4] = tiles[number[order]], head[order]
    items[1:, 6], items[1:, 10] = costs[order], 1
    items[1 + num_whole :, [5, 6, 8, 9, 10]] = rest[:, 1:]
    return items


def num_blocks_of(items: Int32s) -> int:
    return int(items[0, 1])


def assign_tiles(count: int, num_blocks: int) -> Ints:
    """Assign 0 ... count - 1 to blocks in rounds of alternating direction; the last round, possibly partial, is ascending."""
    order = np.arange(count)
    rounds = order[: (count - 1) // num_blocks * num_blocks].reshape(-1, num_blocks)  # except the last
    rounds[::-2] = rounds[::-2, ::-1]
    return order


def cut_round(costs: Ints, num_blocks: int) -> Ints:
    """Return (n, 6): item, its first tile, end of its tiles, number of the item's first part, index among its parts, number of parts.

    The items, fewer than blocks, either stay whole or are concatenated and cut into equal shares: one per block, or as many as cut equal
    items into equal parts. The fastest variant is chosen."""
    count = len(costs)
    whole = np.stack([np.arange(count), np.zeros_like(costs), costs, np.arange(count), np.zeros_like(costs), np.ones_like(costs)], axis=1)
    best, shortest = whole, int(costs.max(initial=0)) + TILES_TO_START
    for num_shares in {num_blocks // count * count, num_blocks} if count else ():
        item, first, end, share = _cut(costs, num_shares)
        round_, part = _ranks(share), _ranks(item)
        time = np.bincount(share, end - first + TILES_TO_START).max() + TILES_TO_MERGE
        if time >= shortest or round_.max() >= MAX_ROUNDS:
            continue
        shortest, best = time, np.zeros(((1 + round_.max()) * num_blocks, 6), dtype=np.int64)
        num_parts = np.bincount(item)[item]
        best[round_ * num_blocks + share] = np.stack([item, first, end, np.arange(len(item)) - part, part, num_parts], axis=1)
    return best


def _cut(costs: Ints, num_shares: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return item, first tile, end tile and share of the pieces in order."""
    ends = costs.cumsum()
    begins = np.arange(num_shares) * ends[-1] // num_shares  # starts of the shares
    edges = np.unique(np.concatenate((begins, ends)))
    item = np.searchsorted(ends, edges[:-1], side="right")
    share = np.searchsorted(begins, edges[:-1], side="right") - 1
    start = (ends - costs)[item]
    return item, edges[:-1] - start, edges[1:] - start, share


def _ranks(values: Ints) -> Ints:
    """Return the rank of each sorted value among its equals."""
    return np.arange(len(values)) - np.searchsorted(values, values)
