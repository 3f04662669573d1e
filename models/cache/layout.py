"""Which tokens of a step attend to which pages."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Which tokens attend to which KV pages in this step.

    Rows are sequences; row r has the step's tokens `qo_indptr_cpu[r] : qo_indptr_cpu[r + 1]`, the last of its `kv_lens_cpu[r]` cached ones:
    the causal mask is aligned to the end. Rows `num_prefill_rows :` are decode rows: the last token drawn, and up to seven guesses of what
    follows. All `*_cpu` tensors are int32 on the CPU.
    """

    qo_indptr_cpu: torch.Tensor  # (R + 1,) token offsets
    kv_lens_cpu: torch.Tensor  # (R,) tokens in the cache after this step
    page_indptr_cpu: torch.Tensor  # (R + 1,) offsets into `pages`
    pages: torch.Tensor  # (sum of pages,) int32 on the device: block ids, row after row
    slot_mapping_T: torch.Tensor  # (T,) int64 on the device: block * page_size + offset where token t's K/V is written
    num_prefill_rows: int

    def prefill_rows(self) -> "AttentionLayout":
        """The layout of the prefill rows alone."""
        end = self.num_prefill_rows + 1
        indptrs = self.qo_indptr_cpu[:end], self.page_indptr_cpu[:end]
        token, page = int(indptrs[0][-1]), int(indptrs[1][-1])
        kv_lens, pages, slots_T = self.kv_lens_cpu[: end - 1], self.pages[:page], self.slot_mapping_T[:token]
        return AttentionLayout(indptrs[0], kv_lens, indptrs[1], pages, slots_T, self.num_prefill_rows)

    def decode_rows(self) -> "AttentionLayout":
        """The layout of the decode rows alone."""
        row = self.num_prefill_rows
        token, page = int(self.qo_indptr_cpu[row]), int(self.page_indptr_cpu[row])
        indptrs = self.qo_indptr_cpu[row:] - token, self.page_indptr_cpu[row:] - page
        return AttentionLayout(indptrs[0], self.kv_lens_cpu[row:], indptrs[1], self.pages[page:], self.slot_mapping_T[token:], 0)


def offsets_of(lengths: npt.NDArray[np.integer]) -> torch.Tensor:
    """(R,) lengths -> (R + 1,) int32 on the CPU: where each row begins, and the end."""
    return torch.from_numpy(np.concatenate(([0], lengths)).cumsum(dtype=np.int32))
