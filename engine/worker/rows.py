"""Per-sequence state of a worker, and conversion of a plan's chunks to the input of a forward pass. Rows are permanent slots. Their last
sampled token stays on the device, so the only token values in a plan are proposed tokens.

A step's layout is rows of q tokens. Prompt chunks come first; their ids come from the host. A decode row is the last sampled token and the
proposed tokens, if any, which the step verifies; the device finds their ids in a table, where it may have written them itself:

    last token of each permanent row | scratch | proposed tokens of each row | scratch | NONE
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from engine.wire.messages import MAX_PROPOSED, ON_DEVICE, Admit, Chunk, SamplingParams
from engine.worker.sampling.reports import NO_REPORTS, StepReports
from engine.worker.sampling.samples import HostSamples, Int64s, Samples, SampleTable
from engine.worker.sampling.verify import NONE, HostProposed
from engine.worker.staging import Staging
from engine.worker.stopwatch import Stopwatch
from models.cache.layout import AttentionLayout, offsets_of
from models.cache.states import RowStates, Snapshots
from models.decoders.batch import ForwardBatch, VisualSlice
from models.kernels.ops import StateRows
from models.kernels.paged import Int32s
from models.kernels.transfers import Transfers, to_host
from models.media.geometry import VisionGeometry
from models.media.mrope import mrope_positions

NO_ADAPTERS = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class Row:
    """One sequence: ids known to the host, M-RoPE positions of its prompt, and the offset of every later position."""

    known_ids: Int32s
    prompt_positions: Int64s  # (3, num_prompt)
    delta: int
    params: SamplingParams
    proposed: Sequence[int] = ()  # by this worker, after its last token; valid once `Rows.proposing` is done

    @property
    def prompt_ids(self) -> Int32s:
        return self.known_ids[: self.prompt_positions.shape[1]]


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step on the host: P prompt tokens, then D tokens of decode rows."""

    ids: Int64s  # (P,)
    gather: Int64s  # (D,) indices of their ids in `Rows.last_tokens`
    rows: Int64s  # (R,) permanent rows
    positions: Int64s  # (3, P + D)
    attention: AttentionLayout  # with pages and slots on the CPU
    visual: tuple[VisualSlice, ...]
    logits_indices: Int64s  # (S,) ascending
    samples: HostSamples  # S, or none if the caller samples
    known: Int64s  # (2, A): indices in `Rows.last_tokens` and their new values: last tokens of new rows, proposed ones
    reports: StepReports = NO_REPORTS
    adapters: Int32s = field(default_factory=lambda: NO_ADAPTERS)  # (P + D,) slots, -1: no adapter; empty: none of the tokens has one

    @classmethod
    def empty(cls) -> "HostStep":
        nothing, no_pages = np.zeros(0, dtype=np.int64), torch.zeros(0, dtype=torch.int32)
        layout = AttentionLayout(offsets_of(nothing), no_pages, offsets_of(nothing), no_pages, torch.from_numpy(nothing), 0)
        pairs, positions = np.zeros((2, 0), dtype=np.int64), np.zeros((3, 0), dtype=np.int64)
        return cls(nothing, nothing, nothing, positions, layout, (), nothing, HostSamples.empty(), pairs)


@dataclass(frozen=True, slots=True)
class StepInputs:
    batch: ForwardBatch  # its logits_indices include the scored tokens
    samples: Samples
    indices_S: torch.Tensor  # int64: indices of the step's logits_indices among these
    scored_2N: torch.Tensor | None  # see `StepReports.stage`


class Rows:
    """Block tables on the host; last tokens and recurrent states on the device, with a scratch row. With a head, also the final hidden
    states of a step; missing blocks are then the scratch block."""

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        geometry: VisionGeometry,
        device: torch.device,
        max_top_k: int = 0,  # see `SamplingOps`
        states: tuple[RowStates, ...] = (),
        snapshots: Snapshots | None = None,  # of the states, if any
        hidden_TX: torch.Tensor | None = None,
        scratch_block: int = 0,
        transfers: Transfers | None = None,
    ):
        self.block_size = block_size
        self.scratch_row = max_num_seqs
        self.last_tokens = torch.full(((max_num_seqs + 1) * (1 + MAX_PROPOSED) + 1,), NONE, dtype=torch.int64, device=device)
        self.last_tokens[: max_num_seqs + 1] = 0
        self._proposed = self.last_tokens[max_num_seqs + 1 : -1].view(-1, MAX_PROPOSED)
        self.proposing = Stopwatch(self.last_tokens.is_cuda)  # ends with the last copy of proposed tokens to the host
        self.states = states
        self.transfers = transfers or Transfers()
        self.hidden_TX = hidden_TX
        self.scratch_block, self.scratch_slot = scratch_block, scratch_block * block_size
        self._snapshots = snapshots
        self._geometry = geometry
        self._samples = SampleTable(max_num_seqs, max_top_k)
        self.sequences: dict[int, Row] = {}  # by row
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._adapters = np.full(max_num_seqs, -1, dtype=np.int32)  # slots

    def admit(self, admit: Admit, prompt_ids: Int32s) -> Int32s:
        """Assign row `admit.row` to this request and return all known ids. `prompt_ids` may be a view of shared memory."""
        spans = [(start, self._geometry.merged((t, h, w))) for start, t, h, w in admit.spans]
        positions, delta = mrope_positions(len(prompt_ids), spans)
        known_ids = np.concatenate([prompt_ids, np.asarray(admit.output_ids, dtype=np.int32)])
        self.sequences[admit.row] = Row(known_ids, positions, delta, admit.params)
        self._samples.set(admit.row, admit.params)
        self._adapters[admit.row] = admit.slot
        self._num_blocks[admit.row] = 0
        self._tables[admit.row] = self.scratch_block
        self._append_blocks(admit.row, admit.blocks)
        if self._snapshots is not None:
            self._snapshots.load(admit.row, admit.snapshot)
        return known_ids

    def take_blocks(self, chunks: Sequence[Chunk]) -> None:
        """Append the chunks' blocks. Call it after all admits of the plan, whose snapshots' blocks it may reuse."""
        for chunk in chunks:
            self._append_blocks(chunk.row, chunk.blocks)
        if self._snapshots is not None:
            self._snapshots.clear([block for chunk in chunks for block in chunk.blocks])

    def save_snapshots(self, step: HostStep, chunks: Sequence[Chunk]) -> None:
        if self._snapshots is not None and any(chunk.snapshot for chunk in chunks):
            for row, chunk in zip(self.state_arrays(step)[0].tolist(), chunks, strict=True):
                if chunk.snapshot:
                    self._snapshots.save(row, chunk.snapshot)

    def build(self, admits: Sequence[Admit], chunks: Sequence[Chunk], images: Mapping[int, torch.Tensor]) -> HostStep:
        num_prefills = len(chunks) - sum(chunk.is_decode for chunk in chunks)
        prefills, decodes = chunks[:num_prefills], chunks[num_prefills:]
        ids, positions = self._tokens(prefills, decodes)
        has_proposed = positions.shape[1] - len(ids) > len(decodes)
        rows, starts, lengths = np.asarray([(chunk.row, chunk.start, chunk.length) for chunk in chunks], dtype=np.int64).T
        logits_indices, samples = self._sampled(chunks, has_proposed)
        known = [(admit.row, self.sequences[admit.row].known_ids[-1]) for admit in admits]
        gather = rows[num_prefills:]
        if has_proposed:
            gather = np.asarray([self._place(chunk.row, i) for chunk in decodes for i in range(chunk.length)])
            proposed = [(self._place(chunk.row, 1 + i), token) for chunk in decodes for i, token in enumerate(chunk.proposed)]
            known += [pair for pair in proposed if pair[1] != ON_DEVICE]
        return HostStep(
            ids=ids,
            gather=gather,
            rows=rows,
            positions=positions,
            attention=self.layout(rows, starts, lengths, num_prefills),
            visual=_visual_slices(prefills, images),
            logits_indices=logits_indices,
            samples=samples,
            known=np.asarray(known, dtype=np.int64).reshape(-1, 2).T,
            reports=StepReports.of(chunks, num_prefills, self.sequences),
            adapters=self._adapters_of(rows, chunks),
        )

    def stage(self, step: HostStep, staging: Staging) -> StepInputs:
        """Copy a step to the device for a forward pass without a graph."""
        num_prefill, layout = len(step.ids), step.attention
        staging.begin()
        ids_T, gather_D = staging.put(np.concatenate((step.ids, np.zeros_like(step.gather)))), staging.put(step.gather)
        positions_3T, adapters_T = staging.put(step.positions), staging.put(step.adapters)
        attention = replace(layout, pages=staging.put(layout.pages.numpy()), slot_mapping_T=staging.put(layout.slot_mapping_T.numpy()))
        tokens, others = step.logits_indices, step.reports.tokens
        wanted = np.unique(np.concatenate((tokens, *others))) if others else tokens
        logits_indices, gather_indices = staging.put(wanted), staging.put(np.searchsorted(wanted, tokens))
        scored_2N = step.reports.stage(wanted, staging)
        samples, known = step.samples.stage(staging), staging.put(step.known)
        rows = self.state_rows([staging.put(array) for array in self.state_arrays(step)], layout.num_prefill_rows)
        staging.copy()
        self.remember(known)
        if len(step.gather):
            ids_T[num_prefill:] = self.last_tokens[gather_D]
        batch = ForwardBatch(ids_T, positions_3T, attention, step.visual, logits_indices, self.states, rows)
        batch = replace(batch, hidden_TX=self.hidden_of(len(ids_T)), adapters_T=adapters_T if len(adapters_T) else None)
        return StepInputs(batch, samples, gather_indices, scored_2N)

    def state_arrays(self, step: HostStep) -> tuple[npt.NDArray[np.integer], ...]:
        """Return the input of `state_rows`; empty for a model without states. Chunks of a prompt in one step form a chain."""
        if not self.states:
            return ()
        starts = step.attention.qo_indptr_cpu.numpy()
        prompts = step.rows[: step.attention.num_prefill_rows]
        goes_on = np.flatnonzero((prompts[1:] == prompts[:-1]) & (prompts[1:] != self.scratch_row))
        targets, firsts = step.rows.copy(), starts[:-1].copy()
        targets[goes_on] = self.scratch_row + 1 + np.arange(len(goes_on))
        for index in goes_on.tolist():
            firsts[index + 1] = firsts[index]
        return targets, starts, step.rows, firsts

    def state_rows(self, arrays: Sequence[torch.Tensor], num_prefill_rows: int) -> StateRows | None:
        if not arrays:
            return None
        targets_R, starts_R1, rows_R, firsts_R = arrays
        return StateRows(targets_R, starts_R1, num_prefill_rows, (rows_R, firsts_R))

    def hidden_of(self, num_tokens: int) -> torch.Tensor | None:
        """Return the output buffer for the hidden states of so many tokens, if they are needed."""
        return None if self.hidden_TX is None else self.hidden_TX[:num_tokens]

    def remember(self, known: torch.Tensor) -> None:
        """Write `HostStep.known` on the device before anything reads it."""
        if known.shape[1]:
            self.last_tokens[known[0]] = known[1]

    def look_up(self, samples: Samples) -> Samples:
        if samples.proposed is None:
            return samples
        return replace(samples, proposed=replace(samples.proposed, next_S=self.last_tokens[samples.proposed.next_S]))

    def deliver(self, tokens_S: torch.Tensor, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the last accepted token of each row. Return host memory for all tokens, with NONE for rejected ones, and the samples' rows:
        the scratch row but for each row's last accepted sample."""
        if samples.proposed is None:
            for group in self.states:
                group.accept(samples.rows_S, None)
            return self.transfers.deliver_(tokens_S, samples.rows_S, self.last_tokens), samples.rows_S
        is_kept_S, is_last_S = samples.proposed.keep(tokens_S)
        rows_S = torch.where(is_last_S, samples.rows_S, self.scratch_row)
        for group in self.states:
            group.accept(rows_S, samples.proposed.offsets_S)
        self.last_tokens.index_copy_(0, rows_S, tokens_S)
        return to_host(torch.where(is_kept_S, tokens_S, NONE)), rows_S

    def propose(self, tokens_SG: torch.Tensor, rows_S: torch.Tensor, samples: HostSamples) -> None:
        """Store the tokens proposed after each row's last token, on the device and, once `proposing` is done, on the host. `rows_S`: see
        `deliver`."""
        num_proposed = tokens_SG.shape[1]
        self._proposed[rows_S, :num_proposed] = tokens_SG
        found = to_host(self._proposed[:, :num_proposed].clone()).numpy()
        for row in samples.rows.tolist():
            self.sequences[row].proposed = memoryview(found[row])
        self.proposing = Stopwatch(self.last_tokens.is_cuda)

    def _place(self, row: int, i: int) -> int:
        """Return the index in the table of the row's last token, or of its i-th proposed one, from 1."""
        return self.scratch_row + MAX_PROPOSED * row + i if i else row

    def _adapters_of(self, rows: Int64s, chunks: Sequence[Chunk]) -> Int32s:
        slots = self._adapters[rows]
        return np.repeat(slots, [chunk.length for chunk in chunks]) if (slots >= 0).any() else NO_ADAPTERS

    def _append_blocks(self, row: int, blocks: Sequence[int]) -> None:
        count = self._num_blocks[row]
        self._tables[row, count : count + len(blocks)] = blocks
        self._num_blocks[row] += len(blocks)

    def _sampled(self, chunks: Sequence[Chunk], has_proposed: bool) -> tuple[Int64s, HostSamples]:
        found: list[tuple[int, ...]] = []
        end = 0
        for chunk in chunks:
            end += chunk.length
            for left in reversed(range(chunk.num_samples)):  # samples of the row after this one
                place = self._place(chunk.row, chunk.num_samples - left) if left else NONE
                found.append((end - 1 - left, chunk.row, chunk.start + chunk.length - left, place))
        indices, rows, positions, next_S = np.ascontiguousarray(np.asarray(found, dtype=np.int64).reshape(-1, 4).T)
        proposed = HostProposed(tuple(self._proposed_in(chunk) for chunk in chunks if chunk.sample), next_S) if has_proposed else None
        return indices, self._samples.samples(rows, positions, proposed)

    def _proposed_in(self, chunk: Chunk) -> Sequence[int]:
        if ON_DEVICE not in chunk.proposed:
            return chunk.proposed
        found = self.sequences[chunk.row].proposed[: len(chunk.proposed)]
        assert len(found) == len(chunk.proposed), "the plan verifies tokens that were not proposed"
        return found

    def _tokens(self, prefills: Sequence[Chunk], decodes: Sequence[Chunk]) -> tuple[Int64s, Int64s]:
        """Return ids of the prefill tokens, and M-RoPE positions of all tokens."""
        ids: list[npt.NDArray[np.integer]] = [np.empty(0, dtype=np.int64)]
        positions = [np.empty((3, 0), dtype=np.int64)]
        for chunk in prefills:
            row = self.sequences[chunk.row]
            end = chunk.start + chunk.length
            ids.append(row.known_ids[chunk.start : end])
            num_prompt = row.prompt_positions.shape[1]
            positions.append(row.prompt_positions[:, chunk.start : min(end, num_prompt)])
            if end > num_prompt:  # recomputed output after a preemption
                later = np.arange(max(chunk.start, num_prompt), end) + row.delta
                positions.append(np.broadcast_to(later, (3, len(later))))
        firsts = [(chunk.start + self.sequences[chunk.row].delta, chunk.length) for chunk in decodes]
        later = np.asarray([first + i for first, length in firsts for i in range(length)], dtype=np.int64)
        positions.append(np.broadcast_to(later, (3, len(later))))
        return np.concatenate(ids).astype(np.int64), np.concatenate(positions, axis=1)

    def layout(self, rows: Int64s, starts: Int64s, lengths: Int64s, num_prefill_rows: int) -> AttentionLayout:
        """Return the layout of a step that computes tokens `starts : starts + lengths` of these rows."""
        kv_lens = starts + lengths
        num_pages = -(-kv_lens // self.block_size)
        firsts, tables = rows * self._tables.shape[1], self._tables.reshape(-1).data
        pages = bytearray().join([tables[a:b] for a, b in zip(firsts.tolist(), (firsts + num_pages).tolist(), strict=True)])
        token_rows = np.repeat(np.arange(len(rows)), lengths)
        first_tokens = np.cumsum(lengths) - lengths
        offsets = np.arange(lengths.sum()) - first_tokens[token_rows] + starts[token_rows]
        slots = self._tables[rows[token_rows], offsets // self.block_size].astype(np.int64) * self.block_size + offsets % self.block_size
        return AttentionLayout(
            qo_indptr_cpu=offsets_of(lengths),
            kv_lens_cpu=torch.from_numpy(kv_lens.astype(np.int32)),
            page_indptr_cpu=offsets_of(num_pages),
            pages=torch.frombuffer(pages, dtype=torch.int32),
            slot_mapping_T=torch.from_numpy(slots),
            num_prefill_rows=num_prefill_rows,
        )


def _visual_slices(prefills: Sequence[Chunk], images: Mapping[int, torch.Tensor]) -> tuple[VisualSlice, ...]:
    slices, first = [], 0
    for chunk in prefills:
        for ref in chunk.visual:
            slices.append(VisualSlice(first + ref.start - chunk.start, ref.length, ref.offset, images[ref.image_id]))
        first += chunk.length
    return tuple(slices)
