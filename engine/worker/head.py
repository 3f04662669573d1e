"""Runs the model's head (`models.layers.head`) after a step: keys and values of the step's tokens, then draft tokens for the rows.

Drafts are chained on the device, so every sample of a row is treated as its last: the head computes drafts after each. Only true last
samples write keys and values where the next draft reads them; the others write to the scratch block. The next step overwrites the drafts'
entries. A row without a block for them uses the scratch block, too; only its drafts get worse.

After a step of few decode tokens the passes are CUDA graphs: launches would take the host longer than the device needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.wire.config import HEAD_GRAPH_TOKENS, MAX_HEAD_DRAFTS
from engine.worker.graphs import PAGE_BYTES, SLACK, Replay, StepGraphs, pad_layout, round_up
from engine.worker.rows import HostStep, Rows
from engine.worker.sampling.samples import HostSamples, Int64s
from engine.worker.staging import Staging, staged_bytes
from models.cache.layout import AttentionLayout, offsets_of
from models.decoders.batch import ForwardBatch, HeadTokens
from models.decoders.contract import LanguageModel
from models.kernels.paged import AttentionBackend, PagedAttention

Inputs = tuple[Int64s, AttentionLayout]  # positions (3, T) and layout of a pass


class PassGraph(NamedTuple):
    replay: Replay
    attention: PagedAttention


class HeadGraphs:
    """The passes after a step of decode rows, all of whose tokens are samples, as CUDA graphs. All read the pages of the last pass."""

    def __init__(self, model: LanguageModel, graphs: StepGraphs, rows: Rows) -> None:
        assert model.predictor is not None and rows.hidden_TX is not None
        self._model, self._predictor, self._of, self._rows, self._hidden_TX = model, model.predictor, graphs, rows, rows.hidden_TX
        self._sizes = [size for size in graphs.sizes if 1 < size <= HEAD_GRAPH_TOKENS]
        most = self._sizes[-1] if self._sizes else 0
        self._tokens = torch.zeros(most, dtype=torch.int64, device=model.device)  # inputs of a pass
        self._drafts = torch.zeros((most, MAX_HEAD_DRAFTS), dtype=torch.int64, device=model.device)  # of all passes
        self._hidden = torch.zeros((most, model.config.text.hidden_size), dtype=model.dtype, device=model.device)
        self._is_last = torch.zeros(most, dtype=torch.bool, device=model.device)
        self._graphs: dict[tuple[int, int], PassGraph] = {}  # by tokens and number of the pass
        self._staging = Staging(0, model.device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every pass, the largest first."""
        empty = np.zeros((3, 0), dtype=np.int64), HostStep.empty().attention
        for size in self._sizes[::-1]:
            attentions = [self._of.make_attention(size) for _ in range(MAX_HEAD_DRAFTS)]
            if not self._graphs:
                fixed = staged_bytes(MAX_HEAD_DRAFTS * self._fixed_arrays(size, attentions[0], empty))
                self._staging = Staging(fixed + PAGE_BYTES * attentions[0].max_pages + SLACK, self._model.device, self._rows.transfers)
            inputs, pages = self._stage(size, attentions, [empty])
            for i, ((positions_3T, slots_T, *plan), attention) in enumerate(zip(inputs, attentions, strict=True)):
                attention.read_from(plan, pages)
                replay, _ = self._of.record(partial(self._forward, i, positions_3T, slots_T, attention))
                self._graphs[size, i] = PassGraph(replay, attention)

    def takes(self, step: HostStep) -> bool:
        return bool(self._sizes) and len(step.gather) == len(step.logits_indices) == step.positions.shape[1] <= self._sizes[-1]

    def run(self, passes: Sequence[Inputs], tokens_S: torch.Tensor, is_last_S: torch.Tensor) -> torch.Tensor:
        """See `Head.run`. The result is valid until the next run."""
        size, count = round_up(self._sizes, len(tokens_S)), len(tokens_S)
        graphs = [self._graphs[size, i] for i in range(MAX_HEAD_DRAFTS)]
        self._stage(size, [graph.attention for graph in graphs], passes)
        self._tokens[:count], self._is_last[:count] = tokens_S, is_last_S
        for graph in graphs[: len(passes)]:
            graph.replay()
        return self._drafts[:count, : len(passes)]

    def _stage(
        self, size: int, attentions: Sequence[PagedAttention], passes: Sequence[Inputs]
    ) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        """Stage the passes, the last one also in place of those that do not run. Return the inputs of each and the pages."""
        last = passes[-1][1]
        whole = [*passes, *[passes[-1]] * (MAX_HEAD_DRAFTS - len(passes))]
        whole = [(each, replace(layout, pages=last.pages, page_indptr_cpu=last.page_indptr_cpu)) for each, layout in whole]
        self._staging.begin()
        arrays = [self._fixed_arrays(size, *each) for each in zip(attentions, whole, strict=True)]
        inputs, pages = [[self._staging.put(array) for array in each] for each in arrays], self._staging.rest(torch.int32)
        self._staging.write(pad_layout(last, size, self._rows).pages.numpy())
        self._staging.copy()
        return inputs, pages

    def _fixed_arrays(self, size: int, attention: PagedAttention, inputs: Inputs) -> list[npt.NDArray[np.integer]]:
        positions, layout = inputs
        positions_3T, slots_T = np.zeros((3, size), dtype=np.int64), np.full(size, self._rows.scratch_slot, dtype=np.int64)
        count = positions.shape[1]
        positions_3T[:, :count], slots_T[:count] = positions, layout.slot_mapping_T.numpy()
        return [positions_3T, slots_T, *attention.plan_arrays(pad_layout(layout, size, self._rows))]

    def _forward(self, i: int, positions_3T: torch.Tensor, slots_T: torch.Tensor, attention: PagedAttention) -> torch.Tensor:
        size, hidden_TX = len(slots_T), self._hidden if i else self._hidden_TX
        if i:
            slots_T = torch.where(self._is_last[:size], slots_T, self._rows.scratch_slot)
        embedded_TD, tokens = self._predictor.embed(self._tokens[:size]), HeadTokens(positions_3T, slots_T)
        hidden_TD = self._predictor.predict(embedded_TD, hidden_TX[:size], tokens, attention, slots_T)
        self._tokens[:size] = self._model.tp.broadcast_(self._predictor.top_tokens(hidden_TD))
        self._drafts[:size, i], self._hidden[:size] = self._tokens[:size], hidden_TD
        return self._drafts


class DraftHead:
    """Draft head. It only launches work."""

    def __init__(
        self, model: LanguageModel, attention: AttentionBackend, rows: Rows, staging: Staging, graphs: HeadGraphs | None = None
    ) -> None:
        assert model.predictor is not None and rows.hidden_TX is not None
        self._model, self._predictor, self._hidden_TX = model, model.predictor, rows.hidden_TX
        self._attention, self._rows, self._staging, self._graphs = attention, rows, staging, graphs

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

    def run(self, step: HostStep, tokens_S: torch.Tensor, rows_S: torch.Tensor, count: int) -> torch.Tensor:
        """See `Head`. A chunk that ends before an image is followed by its placeholder."""
        later = [self._after(step.samples, distance) for distance in range(1, count if len(step.logits_indices) else 0)]
        is_last_S = rows_S != self._rows.scratch_row
        if self._graphs is not None and count and self._graphs.takes(step):
            return self._graphs.run([(step.positions, step.attention), *later], tokens_S, is_last_S)
        put = self._staging.put
        self._staging.begin()
        next_T, sampled_S = put(self._next_ids(step)), put(step.logits_indices)
        passes = [(put(step.positions), self._staged(step.attention))]
        passes += [(put(positions), self._staged(layout)) for positions, layout in later]
        self._staging.copy()
        next_T[sampled_S] = tokens_S
        embedded_TD = self._predictor.embed(next_T)
        starts = {int(start) for start in step.attention.qo_indptr_cpu}
        for item in step.visual:
            rest_ND = item.embedding[0, item.offset + 1 : item.offset + item.length + 1]  # next tokens of the same image
            embedded_TD[item.start : item.start + len(rest_ND)] = rest_ND
            if item.start not in starts:
                embedded_TD[item.start - 1] = item.embedding[0, item.offset]
        hidden_TX, wanted_S = self._hidden_TX[: step.positions.shape[1]], sampled_S if count else sampled_S[:0]
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

    def _after(self, samples: HostSamples, distance: int) -> Inputs:
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


def make_head(model: LanguageModel, attention: AttentionBackend, rows: Rows, num_staged: int, step_graphs: StepGraphs | None) -> DraftHead:
    """`num_staged`: bytes of a step."""
    graphs = None if step_graphs is None else HeadGraphs(model, step_graphs, rows)
    head = DraftHead(model, attention, rows, Staging(MAX_HEAD_DRAFTS * num_staged, model.device), graphs)
    head.warm_up()
    if graphs is not None:
        graphs.capture()
    return head


def run_head(model: LanguageModel, batch: ForwardBatch, attention: AttentionBackend) -> None:
    """Run the head, if there is one, on the tokens of a step: it takes a little more memory than a layer of the step."""
    if model.predictor is not None:
        shape = len(batch.input_ids_T), model.config.text.head_input_size
        hidden_TX = torch.empty(shape, dtype=model.dtype, device=model.device)
        tokens = HeadTokens(batch.positions_3T, batch.attention.slot_mapping_T)
        model.predictor.predict(model.predictor.embed(batch.input_ids_T), hidden_TX, tokens, attention, batch.logits_indices)
