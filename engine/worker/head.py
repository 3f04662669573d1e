"""Runs the model's head (`models.layers.head`) after a step: keys and values of the step's tokens, then draft tokens for the rows.

Drafts are chained on the device, so every sample of a row is treated as its last: the head computes drafts after each. Only true last
samples write keys and values where the next draft reads them; the others write to the scratch block. The next step overwrites the drafts'
entries. A row without a block for them uses the scratch block, too; only its drafts get worse.
"""

from dataclasses import replace

import numpy as np
import torch

from engine.wire.config import MAX_HEAD_DRAFTS
from engine.worker.rows import HostStep, Rows
from engine.worker.sampling.samples import HostSamples, Int64s
from engine.worker.staging import Staging
from models.cache.layout import AttentionLayout, offsets_of
from models.decoders.batch import ForwardBatch, HeadTokens
from models.decoders.contract import LanguageModel
from models.kernels.paged import AttentionBackend


class DraftHead:
    """Draft head. It only launches work, and its attention is not part of a captured graph."""

    def __init__(self, model: LanguageModel, attention: AttentionBackend, rows: Rows, staging: Staging) -> None:
        assert model.predictor is not None and rows.hidden_TX is not None
        self._model, self._predictor, self._hidden_TX = model, model.predictor, rows.hidden_TX
        self._attention, self._rows, self._staging = attention, rows, staging

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run passes of one and of two tokens in the scratch block, so that no request waits for a compiler."""
        hidden_TX, one = self._hidden_TX[[0, 0]], np.ones(1, dtype=np.int32)
        for count in (1, 2):
            index = torch.arange(count, device=self._model.device)
            pages = (self._rows.scratch_block + index[:1]).int()
            lengths = offsets_of(count * one), torch.from_numpy(count * one), offsets_of(one)
            layout = AttentionLayout(*lengths, pages, self._rows.scratch_slot + index, 0)
            self._attention.plan(layout)
            tokens = HeadTokens(index.expand(3, -1).contiguous(), layout.slot_mapping_T)
            found_SD = self._predictor.predict(self._predictor.embed(index), hidden_TX[:count], tokens, self._attention, index)
            self._predictor.top_tokens(found_SD)

    def run(self, step: HostStep, indices_T: Int64s, tokens_S: torch.Tensor, rows_S: torch.Tensor, count: int) -> torch.Tensor:
        """See `Head`. A chunk that ends before an image is followed by its placeholder."""
        put = self._staging.put
        self._staging.begin()
        next_T, hidden_T, sampled_S = put(self._next_ids(step)), put(indices_T), put(step.logits_indices)
        passes = [(put(step.positions), self._staged(step.attention))]
        for distance in range(1, count if len(step.logits_indices) else 0):
            positions, layout = self._after(step.samples, distance)
            passes.append((put(positions), self._staged(layout)))
        self._staging.copy()
        next_T[sampled_S] = tokens_S
        embedded_TD = self._predictor.embed(next_T)
        starts = {int(start) for start in step.attention.qo_indptr_cpu}
        for item in step.visual:
            rest_ND = item.embedding[0, item.offset + 1 : item.offset + item.length + 1]  # next tokens of the same image
            embedded_TD[item.start : item.start + len(rest_ND)] = rest_ND
            if item.start not in starts:
                embedded_TD[item.start - 1] = item.embedding[0, item.offset]
        hidden_TX, wanted_S = self._hidden_TX[hidden_T], sampled_S if count else sampled_S[:0]
        is_last_S = rows_S != self._rows.scratch_row
        head_drafts: list[torch.Tensor] = []
        for positions_3T, layout in passes:
            slots_T = layout.slot_mapping_T
            if head_drafts:
                embedded_TD, wanted_S = self._predictor.embed(head_drafts[-1]), sampled_S
                slots_T = torch.where(is_last_S, slots_T, self._rows.scratch_slot)
            self._attention.plan(layout)
            hidden_TX = self._predictor.predict(embedded_TD, hidden_TX, HeadTokens(positions_3T, slots_T), self._attention, wanted_S)
            if len(wanted_S):
                head_drafts.append(self._predictor.top_tokens(hidden_TX))
                self._model.tp.broadcast_(head_drafts[-1])
        return torch.stack(head_drafts, dim=1) if head_drafts else tokens_S[:, None][:, :0]

    def _next_ids(self, step: HostStep) -> Int64s:
        """Return the known ids after the step's tokens; zeros for tokens to be sampled."""
        next_ids, starts = np.zeros(step.positions.shape[1], dtype=np.int64), step.attention.qo_indptr_cpu.tolist()
        ends = step.attention.kv_lens_cpu[: step.attention.num_prefill_rows].tolist()
        for row, end, first, stop in zip(step.rows.tolist(), ends, starts, starts[1:], strict=False):
            known = self._rows.sequences[row].known_ids[end - stop + first + 1 : end + 1]
            next_ids[first : first + len(known)] = known
        return next_ids

    def _after(self, samples: HostSamples, distance: int) -> tuple[Int64s, AttentionLayout]:
        """Return M-RoPE positions and attention layout of the tokens at this distance after the sampling tokens, one per sample."""
        counts = np.ones_like(samples.rows) if samples.proposed is None else samples.proposed.counts
        firsts = counts.cumsum() - counts
        rows, starts = samples.rows[firsts], samples.positions[firsts] - 1 + distance
        deltas = np.asarray([self._rows.sequences[row].delta for row in rows.tolist()], dtype=np.int64)
        positions = samples.positions - 1 + distance + np.repeat(deltas, counts)
        return np.broadcast_to(positions, (3, len(positions))), self._rows.layout(rows, starts, counts, 0)

    def _staged(self, layout: AttentionLayout) -> AttentionLayout:
        pages, slots_T = (self._staging.put(tensor.numpy()) for tensor in (layout.pages, layout.slot_mapping_T))
        return replace(layout, pages=pages, slot_mapping_T=slots_T)


def make_head(model: LanguageModel, attention: AttentionBackend, rows: Rows, staged_bytes: int) -> DraftHead:
    head = DraftHead(model, attention, rows, Staging(MAX_HEAD_DRAFTS * staged_bytes, model.device))
    head.warm_up()
    return head


def run_head(model: LanguageModel, batch: ForwardBatch, attention: AttentionBackend) -> None:
    """Run the head, if there is one, on the tokens of a step: it takes a little more memory than a layer of the step."""
    if model.predictor is not None:
        shape = len(batch.input_ids_T), model.config.text.head_input_size
        hidden_TX = torch.empty(shape, dtype=model.dtype, device=model.device)
        tokens = HeadTokens(batch.positions_3T, batch.attention.slot_mapping_T)
        model.predictor.predict(model.predictor.embed(batch.input_ids_T), hidden_TX, tokens, attention, batch.logits_indices)
