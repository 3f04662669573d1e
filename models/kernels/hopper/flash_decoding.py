"""Attention of few query tokens: plans for `flash_decoding.cu`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from models.cache.layout import AttentionLayout
from models.kernels.hopper.compile import load_kernel
from models.kernels.ops import KVPool
from models.kernels.paged import Int32s, plan_on_device
from models.kernels.triton.launch import num_multiprocessors
from models.kernels.units import UNIT_FIELDS, group_tokens, max_units, plan_units, token_groups

BLOCKS = 3  # of the kernel that run at once on each multiprocessor


@dataclass(frozen=True, slots=True)
class Scratch:
    """Results of groups in several parts, shared by backends that run on one stream. Arrivals are zero before and after.

    Each part of U leaves the values of its G query tokens with their logarithmic sums (base 2); the last to arrive merges them.
    """

    max_pages: int
    partials_UGHK: torch.Tensor
    sums_UGH: torch.Tensor
    arrivals_UN: torch.Tensor

    @classmethod
    def allocate(cls, pools: Sequence[KVPool], num_heads: int, max_groups: int, max_pages: int) -> "Scratch":
        """`max_pages` bounds the pages of all rows of a step together; a shared one counts for each."""
        _, _, kv_heads, head_dim = pools[0][0].shape
        device = pools[0][0].device
        num_units = max_units(max_groups, kv_heads, BLOCKS * num_multiprocessors(device))
        shape = num_units, group_tokens(num_heads, kv_heads), num_heads
        return cls(
            max_pages=max_pages,
            partials_UGHK=torch.empty((*shape, head_dim), device=device),
            sums_UGH=torch.empty(shape, device=device),
            arrivals_UN=torch.zeros((shape[0], kv_heads), dtype=torch.int32, device=device),
        )


class FlashDecoding:
    """See `FixedAttention`: rows of up to `max_groups` token groups, cut into units that fill the device, see `units`.

    A token that is not planned is not written. Values in the rows' pages must be finite, also behind a row's last key: those count times 0.
    """

    def __init__(self, pools: Sequence[KVPool], max_groups: int, scratch: Scratch) -> None:
        self._pools = pools
        self._scratch = scratch
        k_pool = pools[0][0]
        self._page_size, self._kv_heads, head_dim = k_pool.shape[1:]
        self._scale = head_dim**-0.5
        self._kernel = load_kernel("flash_decoding", head_dim)
        self._num_multiprocessors = num_multiprocessors(k_pool.device)
        self._num_units = max_units(max_groups, self._kv_heads, BLOCKS * self._num_multiprocessors)
        self._units_UF = torch.zeros((0, UNIT_FIELDS), dtype=torch.int32, device=k_pool.device)
        self._pages = self._units_UF[0:0, 0]

    @classmethod
    def factory(cls, pools: Sequence[KVPool], num_heads: int, max_groups: int, max_pages: int) -> Callable[[int], "FlashDecoding"]:
        """Makes backends by number of token groups, with shared scratch memory."""
        scratch = Scratch.allocate(pools, num_heads, max_groups, max_pages)
        return lambda num_groups: cls(pools, num_groups, scratch)

    @property
    def max_pages(self) -> int:
        return self._scratch.max_pages

    def plan(self, layout: AttentionLayout) -> None:
        plan_on_device(self, layout)

    def plan_arrays(self, layout: AttentionLayout, first_page: int = 0, num_taken: int = 0) -> tuple[Int32s]:
        """The units (U, UNIT_FIELDS), padded for `max_groups`. Its pages begin at `first_page`; the kernel beside takes `num_taken`
        multiprocessors (all: this one runs when they are free)."""
        assert first_page + len(layout.pages) <= self.max_pages, f"{len(layout.pages)} pages are more than {self.max_pages}"
        groups = token_groups(layout, self._scratch.partials_UGHK.shape[1])
        groups[:, 2] += first_page
        units = np.zeros((self._num_units, UNIT_FIELDS), dtype=np.int32)
        num_free = (self._num_multiprocessors - num_taken) or self._num_multiprocessors
        planned = plan_units(groups, max_units(len(groups), self._kv_heads, BLOCKS * num_free))
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

    def run_into(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor, is_beside: bool = False) -> None:
        """As `run`, for a result whose place is known. `is_beside`: the last kernel before, that of prefill, may go on meanwhile."""
        keys, values = (pool.flatten(0, 1) for pool in self._pools[layer])
        scratch = self._scratch
        buffers = self._pages, scratch.partials_UGHK, scratch.sums_UGH, scratch.arrivals_UN
        self._kernel.run(q_THK, keys, values, out_THK, self._units_UF, *buffers, self._page_size, self._scale, is_beside)
