"""Device state that changes a row's logits: token counts, and additions to single logits.

It is written when the row is admitted, from the prompt and the known output, so it survives a preemption; then samples update it on the
device, as the host receives their ids one step later.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.wire.params import MAX_LOGIT_EDITS, PENALISING, SamplingParams
from engine.worker.sampling.samples import EDITS, PENALTIES, Samples, changes_of
from engine.worker.sampling.verify import NONE, Proposed
from models.kernels.paged import Int32s
from models.kernels.sampling import IN_PROMPT, SamplingOps
from models.kernels.transfers import to_device

FOREVER = 2**31 - 1
EDIT = (MAX_LOGIT_EDITS,)
RECORD = np.dtype([("penalties", "f4", (3,)), ("edited", "i4", EDIT), ("values", "f4", EDIT), ("until", "i4", EDIT)])  # of a row


class LogitState:
    """State of the rows: counts (R, V), 78 MB for 128 rows of Qwen3's vocabulary, and a record (R, ...) of a few kilobytes."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._device, self._vocab_size = device, vocab_size
        self._counts_RV = torch.zeros((max_num_seqs, vocab_size), dtype=torch.int32, device=device)
        self._records = torch.zeros((max_num_seqs, RECORD.itemsize // 4), dtype=torch.int32, device=device)
        self._fields = {name: self._field(name) for name in RECORD.names or ()}

    def _field(self, name: str) -> torch.Tensor:
        kind, end = RECORD[name], RECORD.fields[name][1] + RECORD[name].itemsize  # type: ignore[index]
        values = self._records[:, (end - kind.itemsize) // 4 : end // 4].unflatten(1, kind.shape)
        return values.view(torch.float32) if kind.base.kind == "f" else values

    def admit(self, row: int, params: SamplingParams, ids: Int32s, num_prompt: int, eos_ids: Sequence[int]) -> None:
        """Assign row `row` to this request; the first `num_prompt` of `ids` are the prompt."""
        changes = changes_of(params)
        if not changes:
            return
        self._records[row] = to_device(make_record(params, num_prompt, eos_ids)[None].view(np.int32), self._device)
        if changes & PENALTIES:
            counts_V, ids_T = self._counts_RV[row], to_device(ids, self._device).long()
            counts_V.zero_()
            counts_V.index_fill_(0, ids_T[:num_prompt], IN_PROMPT)  # assigning a number would wait for the device
            counts_V.index_add_(0, ids_T[num_prompt:], torch.ones_like(ids_T[num_prompt:], dtype=torch.int32))

    def change_(self, logits_SV: torch.Tensor, samples: Samples, ops: SamplingOps) -> None:
        """Change the logits of `samples.changed_A`: single logits first, then penalties, as vLLM."""
        rows_A = samples.rows_S[samples.changed_A]
        flat, starts_A1 = logits_SV.view(-1), (samples.changed_A * logits_SV.shape[1])[:, None]
        if samples.changes & EDITS:
            values_AE = torch.where(samples.positions_A[:, None] < self._fields["until"][rows_A], self._fields["values"][rows_A], 0.0)
            flat.index_add_(0, (starts_A1 + self._fields["edited"][rows_A]).flatten(), values_AE.flatten())
        if samples.changes & PENALTIES:
            counts = self._counts_RV, rows_A
            if samples.proposed is not None:
                counts = self._counts_after(samples.proposed, samples.changed_A, rows_A)
            ops.penalise_(logits_SV, samples.changed_A, *counts, self._fields["penalties"][rows_A])

    def note(self, tokens_S: torch.Tensor, samples: Samples) -> None:
        if not samples.changes & PENALTIES:
            return
        rows_A, tokens_A = samples.rows_S[samples.changed_A], tokens_S[samples.changed_A]
        counting_A = torch.ones_like(tokens_A, dtype=torch.int32)
        if samples.proposed is not None:
            counting_A = samples.proposed.keep(tokens_S)[0][samples.changed_A].int()
        self._counts_RV.view(-1).index_add_(0, rows_A * self._vocab_size + tokens_A, counting_A)

    def _counts_after(self, proposed: Proposed, index_A: torch.Tensor, rows_A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (A, V) counts as if the proposed tokens before each sample were accepted, and the index of each."""
        counts_AV, before_AX = self._counts_RV[rows_A], proposed.before(index_A)
        counts_AV.scatter_add_(1, before_AX.clamp(min=0), (before_AX != NONE).int())
        return counts_AV, torch.arange(len(index_A), device=self._device)


def make_record(params: SamplingParams, num_prompt: int, eos_ids: Sequence[int]) -> npt.NDArray[np.void]:
    """Return a RECORD. It adds `values` to the logits of the `edited` tokens at positions before `until`."""
    edits = [(token, value, FOREVER) for token, value in params.logit_bias]
    edits += [(token, -np.inf, FOREVER) for token in params.bad_words]
    if params.min_tokens > 0:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        edits += [(token, -np.inf, num_prompt + params.min_tokens) for token in ends]
    record = np.zeros((), RECORD)
    record["penalties"] = [getattr(params, name) for name in PENALISING]
    for name, column in zip(("edited", "values", "until"), zip(*edits, strict=True), strict=False):
        record[name][: len(edits)] = column
    return record
