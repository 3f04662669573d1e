"""Attention of few query tokens: plans for `flash_decoding.cu`."""

from collections.abc import Sequence

import torch

from models.cache.layout import AttentionLayout
from models.kernels.hopper.compile import load_kernel
from models.kernels.hopper.tile_plan import num_blocks_of
from models.kernels.ops import FLOAT8, KVPool
from models.kernels.paged import Int32s
from models.kernels.triton.launch import num_multiprocessors
from models.kernels.work_items import group_tokens, max_work_items, padded, plan_work_items, token_groups

BLOCKS = 3  # concurrent blocks of the kernel per multiprocessor


class SplitKernel:
    """The kernel for these pools, with scratch memory that its pieces share on one stream, for the results of groups in several parts.

    Each of W parts stores the values of its G query tokens and the logarithms (base 2) of their sums; the last part to finish merges them.
    `arrivals` are zero before and after."""

    def __init__(self, pools: Sequence[KVPool], num_heads: int) -> None:
        k_pool = pools[0][0]
        self.page_size, self.kv_heads, self.head_dim = k_pool.shape[1:]
        is_float8 = k_pool.dtype == FLOAT8
        self.kernel, self.scale = load_kernel("flash_decoding", self.head_dim, is_float8), self.head_dim**-0.5
        slots = [[pool.flatten(0, 1) for pool in pair] for pair in pools]
        self.slots = [[pool.view(torch.bfloat16) for pool in pair] for pair in slots] if is_float8 else slots  # pairs of float8 values
        self.num_multiprocessors = num_multiprocessors(k_pool.device)
        self.group_tokens, self._num_heads, self._device = group_tokens(num_heads, self.kv_heads), num_heads, k_pool.device
        self._grow(0)

    def num_items(self, num_groups: int, num_taken: int = 0) -> int:
        """Return the number of work items for so many token groups. Another kernel occupies `num_taken` multiprocessors (if all, this
        kernel runs after it)."""
        return max_work_items(num_groups, self.kv_heads, BLOCKS * (self.num_multiprocessors - num_taken or self.num_multiprocessors))

    def reserve(self, num_groups: int) -> None:
        """Allocate scratch memory for so many token groups; call before any capture."""
        if (num_items := self.num_items(num_groups)) > len(self.sums_WGH):
            self._grow(num_items)

    def _grow(self, num_items: int) -> None:
        shape = num_items, self.group_tokens, self._num_heads
        self.partials_WGHK = torch.empty((*shape, self.head_dim), device=self._device)
        self.sums_WGH = torch.empty(shape, device=self._device)
        self.arrivals_WN = torch.zeros((num_items, self.kv_heads), dtype=torch.int32, device=self._device)


class Split:
    """See `Piece`: rows of up to `num_groups` token groups, cut into work items that fill the device. With `num_prefill`, only the decode
    rows after these tokens, which the previous piece computes concurrently.

    Unplanned tokens are not written. Values in the rows' pages must be finite, even after a row's last key, since they are multiplied by
    0."""

    def __init__(self, of: SplitKernel, num_groups: int, num_prefill: int = 0) -> None:
        of.reserve(num_groups)
        self._of, self._num_prefill = of, num_prefill
        self._num_items = of.num_items(num_groups)

    def plan(self, layout: AttentionLayout, before: Sequence[Int32s]) -> Int32s:
        """Return the work items, padded."""
        of, first_page, num_taken = self._of, 0, 0
        if self._num_prefill:
            first_page = int(layout.page_indptr_cpu[layout.num_prefill_rows])  # both kernels read the same list
            layout, num_taken = layout.decode_rows(), num_blocks_of(before[-1])
        groups = token_groups(layout, of.group_tokens)
        groups[:, 2] += first_page
        return padded(plan_work_items(groups, of.num_items(len(groups), num_taken)), self._num_items)

    def launch(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor, plan: torch.Tensor, pages: torch.Tensor) -> None:
        of, own, overlaps = self._of, slice(self._num_prefill, None), self._num_prefill > 0
        of.kernel.run(
            q_THK[own], *of.slots[layer], out_THK[own], plan, pages, of.partials_WGHK, of.sums_WGH, of.arrivals_WN, of.page_size, of.scale,
            overlaps,
        )  # fmt: skip
