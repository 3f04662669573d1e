"""Device state that changes a row's logits: token counts, additions to single logits, forbidden words.

It is written when the row is admitted, from the prompt and the known output, so it survives a preemption; then samples update it on the
device, as the host receives their ids one step later.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.wire.messages import MAX_PROPOSED
from engine.wire.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_EDITS, PENALISING, SamplingParams
from engine.worker.sampling.samples import EDITS, PENALTIES, WORDS, Samples, changes_of
from engine.worker.sampling.verify import NONE, Proposed
from models.kernels.paged import Int32s
from models.kernels.sampling import IN_PROMPT, SamplingOps
from models.kernels.transfers import to_device

FOREVER = 2**31 - 1
ANY = -1  # padding before a word that is shorter than the longest
NOTHING = -2  # padding before an output that is shorter than a word
EDIT = (MAX_LOGIT_EDITS,)
RECORD = np.dtype([  # record of a row: fields of four bytes per element
    ("penalties", "f4", (3,)), ("edited", "i4", EDIT), ("values", "f4", EDIT), ("until", "i4", EDIT),
    ("words", "i4", (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)), ("tail", "i4", (MAX_BAD_WORD_TOKENS - 1,)),
])  # fmt: skip


class LogitState:
    """State of the rows: counts (R, V), 78 MB for 128 rows of Qwen3's vocabulary, and a record (R, ...) of a few kilobytes; one more row is
    scratch."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._device, self._vocab_size = device, vocab_size
        self._counts_RV = torch.zeros((max_num_seqs, vocab_size), dtype=torch.int32, device=device)
        self._records = torch.zeros((max_num_seqs + 1, RECORD.itemsize // 4), dtype=torch.int32, device=device)
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
        self._records[row] = to_device(make_record(params, ids, num_prompt, eos_ids)[None].view(np.int32), self._device)
        if changes & PENALTIES:
            counts_V, ids_T = self._counts_RV[row], to_device(ids, self._device).long()
            counts_V.zero_()
            counts_V.index_fill_(0, ids_T[:num_prompt], IN_PROMPT)  # assigning a number would wait for the device
            counts_V.index_add_(0, ids_T[num_prompt:], torch.ones_like(ids_T[num_prompt:], dtype=torch.int32))

    def change_(self, logits_SV: torch.Tensor, samples: Samples, ops: SamplingOps) -> None:
        """Change the logits of `samples.changed_A`: single logits first, then penalties, as vLLM; forbidden words last."""
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
        if samples.changes & WORDS:
            words_AWN, tails_AN = self._fields["words"][rows_A], self._tails_of(samples, rows_A)
            heads_AWN, last_AW = words_AWN[..., :-1], words_AWN[..., -1]
            matches_AW = ((heads_AWN == tails_AN[:, None]) | (heads_AWN == ANY)).all(-1) & (last_AW != ANY)
            values_AW = torch.where(matches_AW, -torch.inf, 0.0)
            flat.index_add_(0, (starts_A1 + last_AW.clamp(min=0)).flatten(), values_AW.flatten())

    def note(self, tokens_S: torch.Tensor, samples: Samples) -> None:
        rows_A, tokens_A = samples.rows_S[samples.changed_A], tokens_S[samples.changed_A]
        counting_A, last_rows_A = torch.ones_like(tokens_A, dtype=torch.int32), rows_A
        if samples.proposed is not None:
            is_kept_A, is_last_A = (flags_S[samples.changed_A] for flags_S in samples.proposed.keep(tokens_S))
            counting_A, last_rows_A = is_kept_A.int(), torch.where(is_last_A, rows_A, len(self._records) - 1)
        if samples.changes & PENALTIES:
            self._counts_RV.view(-1).index_add_(0, rows_A * self._vocab_size + tokens_A, counting_A)
        if samples.changes & WORDS:
            self._fields["tail"][last_rows_A] = torch.cat((self._tails_of(samples, rows_A)[:, 1:], tokens_A.int()[:, None]), dim=1)

    def _counts_after(self, proposed: Proposed, index_A: torch.Tensor, rows_A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (A, V) counts as if the proposed tokens before each sample were accepted, and the index of each."""
        counts_AV, before_AX = self._counts_RV[rows_A], proposed.before(index_A)
        counts_AV.scatter_add_(1, before_AX.clamp(min=0), (before_AX != NONE).int())
        return counts_AV, torch.arange(len(index_A), device=self._device)

    def _tails_of(self, samples: Samples, rows_A: torch.Tensor) -> torch.Tensor:
        """Return (A, N) last tokens before each sample of `samples.changed_A`."""
        tails_AN = self._fields["tail"][rows_A]
        if samples.proposed is None:
            return tails_AN
        num_tail, offsets_A1 = tails_AN.shape[1], samples.proposed.offsets_S[samples.changed_A][:, None]
        tokens = torch.cat((tails_AN, samples.proposed.before(samples.changed_A).int()), dim=1)
        place_N = torch.arange(num_tail, device=self._device)
        is_old_AN = offsets_A1 + place_N < num_tail
        return tokens.gather(1, torch.where(is_old_AN, offsets_A1 + place_N, MAX_PROPOSED + place_N))


def make_record(params: SamplingParams, ids: Int32s, num_prompt: int, eos_ids: Sequence[int]) -> npt.NDArray[np.void]:
    """Return a RECORD. It adds `values` to the logits of the `edited` tokens at positions before `until`."""
    edits = [(token, value, FOREVER) for token, value in params.logit_bias]
    edits += [(word[0], -np.inf, FOREVER) for word in params.bad_words if len(word) == 1]
    if params.min_tokens > 0:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        edits += [(token, -np.inf, num_prompt + params.min_tokens) for token in ends]
    record = np.zeros((), RECORD)
    record["penalties"] = [getattr(params, name) for name in PENALISING]
    for name, column in zip(("edited", "values", "until"), zip(*edits, strict=True), strict=False):
        record[name][: len(edits)] = column
    record["words"], record["tail"] = ANY, NOTHING
    for i, word in enumerate(word for word in params.bad_words if len(word) > 1):
        record["words"][i, -len(word) :] = word
    tail, output = record["tail"], ids[num_prompt:]
    tail[len(tail) - min(len(tail), len(output)) :] = output[-len(tail) :]
    return record
