"""`AttentionBackend` for steps of single tokens, on our Triton kernel: the same in CUDA graphs and outside.

Made by the worker for its graphs, and by `attention_flashinfer` for the decode rows of a mixed step.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from models.batch import AttentionLayout
from models.layers.kernels_attention import TILE, UNIT_FIELDS, decode_attention_
from models.layers.kernels_text import num_multiprocessors
from models.layers.ops import KVPool

PROGRAMS = 4  # on each multiprocessor: more than run at the same time, so that none is idle at the end
MIN_TILES = 2  # of a unit, if its row has them: to merge many parts takes longer than to read a few tiles

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Scratch:
    """What backends share whose replays follow each other on one stream: the page list, and the results of rows in several parts."""

    pages: torch.Tensor
    partials_UHK: torch.Tensor
    sums_UH: torch.Tensor
    arrivals_UG: torch.Tensor

    @classmethod
    def allocate(cls, pools: Sequence[KVPool], num_heads: int, max_rows: int, max_pages: int) -> "Scratch":
        """`max_pages` bounds the pages of all rows of a step together; a page that several rows share counts for each of them."""
        _, _, kv_heads, head_dim = pools[0][0].shape
        device = pools[0][0].device
        units = max_units(max_rows, kv_heads, device)
        return cls(
            pages=torch.zeros(max_pages, dtype=torch.int32, device=device),
            partials_UHK=torch.empty((units, num_heads, head_dim), device=device),
            sums_UH=torch.empty((units, num_heads), device=device),
            arrivals_UG=torch.zeros((units, kv_heads), dtype=torch.int32, device=device),
        )


class DecodeAttention:
    """See `AttentionBackend`. Up to `max_rows` decode rows at fixed addresses, so that `run` can be captured in a CUDA graph.

    Work is cut into units of about equal length, so many that they fill the device: a long row is many units, a short one is one.
    `plan` stays outside the graph and is called before each replay. A row that is not planned is not written.
    """

    def __init__(self, pools: Sequence[KVPool], max_rows: int, scratch: Scratch) -> None:
        self._pools = pools
        self._scratch = scratch
        k_pool = pools[0][0]
        self._kv_heads, self._device = k_pool.shape[2], k_pool.device
        shape = max_units(max_rows, self._kv_heads, self._device), UNIT_FIELDS
        self._units_UF = torch.zeros(shape, dtype=torch.int32, device=self._device)

    @classmethod
    def factory(cls, pools: Sequence[KVPool], num_heads: int, max_rows: int, max_pages: int) -> Callable[[int], "DecodeAttention"]:
        """Makes backends by number of rows, at most `max_rows`, that share their scratch memory."""
        scratch = Scratch.allocate(pools, num_heads, max_rows, max_pages)
        return lambda num_rows: cls(pools, num_rows, scratch)

    def plan(self, layout: AttentionLayout) -> None:
        """Takes the decode rows of the layout; prefill rows before them are somebody else's."""
        rows = layout.num_prefill_rows
        kv_lens, page_indptr = layout.kv_lens_cpu[rows:].numpy(), layout.page_indptr_cpu[rows:].numpy()
        limit = max_units(len(kv_lens), self._kv_heads, self._device)
        units = np.zeros(self._units_UF.shape, dtype=np.int32)
        planned = plan_units(kv_lens, page_indptr[:-1] - page_indptr[0], limit)
        units[: len(planned)] = planned
        staged = torch.from_numpy(units)
        if self._device.type == "cuda":
            staged = staged.pin_memory()  # a buffer of its own: torch gives it to nobody before the copy is done
        self._units_UF.copy_(staged, non_blocking=True)
        pages = layout.pages[page_indptr[0] : page_indptr[-1]]
        self._scratch.pages[: len(pages)].copy_(pages)

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        out_THK = torch.empty_like(q_THK)
        self.run_into(layer, q_THK, out_THK)
        return out_THK

    def run_into(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor) -> None:
        """As `run`, for a result whose place is known."""
        scratch = self._scratch
        buffers = scratch.pages, scratch.partials_UHK, scratch.sums_UH, scratch.arrivals_UG
        decode_attention_(q_THK, self._pools[layer], self._units_UF, *buffers, out_THK)


def max_units(num_rows: int, kv_heads: int, device: torch.device) -> int:
    """So many that they fill the device, and a few more than rows, so that there is room to cut the longest ones."""
    return max(-(-PROGRAMS * num_multiprocessors(device) // kv_heads), num_rows + num_rows // 2 + 1)


def plan_units(kv_lens: Int32s, first_pages: Int32s, limit: int) -> Int32s:
    """At most `limit` units (U, 8) as in `decode_attention_`, longest first. There must be more units than rows.

    No unit is longer than MIN_TILES or is needed to stay within the limit, and those of a row are equal up to a tile. The shortest
    length in tiles that stays within the limit lies between sum / limit and (sum - rows) / (limit - rows), as t tiles are at most
    (t - 1) / length + 1 units.
    """
    num_rows = len(kv_lens)
    tiles = -(-kv_lens // TILE)
    total = int(tiles.sum())
    low, high = -(-total // limit), max(1, -(-(total - num_rows) // (limit - num_rows)))
    length = low + bisect_left(range(low, high), True, key=lambda size: int((-(-tiles // size)).sum()) <= limit)
    counts = -(-tiles // max(length, MIN_TILES))
    row = np.repeat(np.arange(num_rows), counts)
    first = (np.cumsum(counts) - counts)[row]
    index = np.arange(len(row))
    part, parts, row_tiles = index - first, counts[row], tiles[row]
    start, stop = part * row_tiles // parts * TILE, np.minimum((part + 1) * row_tiles // parts * TILE, kv_lens[row])
    units = np.stack((row, first_pages[row], start, stop, index, first, parts, np.zeros_like(row)), axis=1)
    return units[np.argsort(start - stop, kind="stable")].astype(np.int32)
