"""Attention layout of a step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Rows of tokens and the KV pages that they attend to.

    Rows are sequences; row r has the step's tokens `qo_indptr_cpu[r] : qo_indptr_cpu[r + 1]`, the last of its `kv_lens_cpu[r]` cached ones:
    the causal mask is aligned to the end. Rows `num_prefill_rows :` are decode rows: the last sampled token and up to seven tokens
    to verify. All `*_cpu` tensors are int32 on the CPU.
    """

    qo_indptr_cpu: torch.Tensor  # (R + 1,) token offsets
    kv_lens_cpu: torch.Tensor  # (R,) tokens in the cache after this step
    page_indptr_cpu: torch.Tensor  # (R + 1,) offsets into `pages`
    pages: torch.Tensor  # (sum of pages,) int32 on the device: block ids, row after row
    slot_mapping_T: torch.Tensor  # (T,) int64 on the device: block * page_size + offset where token t's K/V is written
    num_prefill_rows: int

    def prefill_rows(self) -> "AttentionLayout":
        return self._rows(0, self.num_prefill_rows)

    def decode_rows(self) -> "AttentionLayout":
        return self._rows(self.num_prefill_rows, len(self.kv_lens_cpu))

    def _rows(self, first: int, end: int) -> "AttentionLayout":
        tokens, pages = self.qo_indptr_cpu[first : end + 1], self.page_indptr_cpu[first : end + 1]
        return AttentionLayout(
            qo_indptr_cpu=tokens - tokens[0],
            kv_lens_cpu=self.kv_lens_cpu[first:end],
            page_indptr_cpu=pages - pages[0],
            pages=self.pages[int(pages[0]) : int(pages[-1])],
            slot_mapping_T=self.slot_mapping_T[int(tokens[0]) : int(tokens[-1])],
            num_prefill_rows=max(0, self.num_prefill_rows - first),
        )


def offsets_of(lengths: npt.NDArray[np.integer]) -> torch.Tensor:
    """Convert (R,) lengths to (R + 1,) int32 offsets on the CPU."""
    return torch.from_numpy(np.concatenate(([0], lengths)).cumsum(dtype=np.int32))
