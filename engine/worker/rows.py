"""What a worker remembers of each running sequence, and how a plan's chunks become the explicit input of a forward pass.

Used by the runner. Rows are permanent slots: their last sampled token stays on the device, so a plan carries no token values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import Admit, Chunk, SamplingParams
from engine.worker.sampler import SamplingInputs
from engine.worker.staging import Staging
from models.batch import AttentionLayout, ForwardBatch, VisualSlice, offsets_of
from models.geometry import VisionGeometry
from models.mrope import mrope_positions

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class Row:
    """A sequence as admitted: ids known to the host, M-RoPE positions of its prompt, and what is added to every later position."""

    known_ids: Int32s
    prompt_positions: Int64s  # (3, num_prompt)
    delta: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device. `decode_rows`: rows whose input token is the last one drawn; they are the last tokens of the batch."""

    batch: ForwardBatch
    sampling: SamplingInputs
    decode_rows: torch.Tensor


class Rows:
    """All rows of a worker: block tables on the host, last tokens on the device (one scratch row more, for padded graphs)."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, geometry: VisionGeometry, device: torch.device):
        self.block_size = block_size
        self.last_token_R = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._geometry = geometry
        self._rows: list[Row | None] = [None] * max_num_seqs
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def admit(self, admit: Admit, prompt_ids: Int32s) -> None:
        """Row `admit.row` now holds this request. `prompt_ids` may be a view of shared memory: it is copied."""
        spans = [(start, self._geometry.merged((t, h, w))) for start, t, h, w in admit.spans]
        positions, delta = mrope_positions(len(prompt_ids), spans)
        known_ids = np.concatenate([prompt_ids, np.asarray(admit.output_ids, dtype=np.int32)])
        self._rows[admit.row] = Row(known_ids, positions, delta, admit.params)
        self._num_blocks[admit.row] = 0
        self.append_blocks(admit.row, admit.blocks)

    def append_blocks(self, row: int, blocks: Sequence[int]) -> None:
        count = self._num_blocks[row]
        self._tables[row, count : count + len(blocks)] = blocks
        self._num_blocks[row] += len(blocks)

    def build(self, admits: Sequence[Admit], chunks: Sequence[Chunk], images: Mapping[int, torch.Tensor], staging: Staging) -> StepInputs:
        """Turns a plan's chunks into tensors: decides nothing, only looks up."""
        num_decodes = sum(is_decode(chunk) for chunk in chunks)
        prefills, decodes = chunks[: len(chunks) - num_decodes], chunks[len(chunks) - num_decodes :]
        staging.begin()
        ids, positions = self._tokens(prefills, decodes)
        ids_T, positions_3T = staging.put(ids), staging.put(positions)
        attention = self._layout(chunks, len(prefills), staging)
        ends = np.cumsum([chunk.length for chunk in chunks], dtype=np.int64)
        sampled = [(end - 1, chunk) for end, chunk in zip(ends.tolist(), chunks, strict=True) if chunk.sample]
        logits_indices = staging.put(np.asarray([index for index, _ in sampled], dtype=np.int64))
        sampling = SamplingInputs.stage(
            rows=[chunk.row for _, chunk in sampled],
            params=[self._row(chunk.row).params for _, chunk in sampled],
            positions=[chunk.start + chunk.length for _, chunk in sampled],
            staging=staging,
        )
        decode_rows = staging.put(np.asarray([chunk.row for chunk in decodes], dtype=np.int64))
        admitted = staging.put(np.asarray([admit.row for admit in admits], dtype=np.int64))
        last_known = staging.put(np.asarray([self._row(admit.row).known_ids[-1] for admit in admits], dtype=np.int64))
        staging.copy()
        if admits:
            self.last_token_R[admitted] = last_known
        if decodes:
            ids_T[len(ids) - num_decodes :] = self.last_token_R[decode_rows]
        visual = _visual_slices(prefills, images)
        batch = ForwardBatch(ids_T, positions_3T, attention, visual, logits_indices)
        return StepInputs(batch, sampling, decode_rows)

    def _row(self, row: int) -> Row:
        found = self._rows[row]
        assert found is not None, f"row {row} was never admitted"
        return found

    def _tokens(self, prefills: Sequence[Chunk], decodes: Sequence[Chunk]) -> tuple[Int64s, Int64s]:
        """Ids (decodes: 0, replaced on the device) and M-RoPE positions of the step's tokens."""
        ids: list[npt.NDArray[np.integer]] = [np.empty(0, dtype=np.int64)]
        positions = [np.empty((3, 0), dtype=np.int64)]
        for chunk in prefills:
            row = self._row(chunk.row)
            end = chunk.start + chunk.length
            ids.append(row.known_ids[chunk.start : end])
            num_prompt = row.prompt_positions.shape[1]
            positions.append(row.prompt_positions[:, chunk.start : min(end, num_prompt)])
            if end > num_prompt:  # recomputed output, after a preemption
                later = np.arange(max(chunk.start, num_prompt), end) + row.delta
                positions.append(np.broadcast_to(later, (3, len(later))))
        last = np.asarray([chunk.start + self._row(chunk.row).delta for chunk in decodes], dtype=np.int64)
        ids.append(np.zeros(len(decodes), dtype=np.int64))
        positions.append(np.broadcast_to(last, (3, len(decodes))))
        return np.concatenate(ids).astype(np.int64), np.concatenate(positions, axis=1)

    def _layout(self, chunks: Sequence[Chunk], num_prefill_rows: int, staging: Staging) -> AttentionLayout:
        rows = np.asarray([chunk.row for chunk in chunks])
        starts = np.asarray([chunk.start for chunk in chunks])
        lengths = np.asarray([chunk.length for chunk in chunks])
        kv_lens = starts + lengths
        num_pages = -(-kv_lens // self.block_size)
        tables = self._tables[rows, : num_pages.max()]
        pages = tables[np.arange(num_pages.max()) < num_pages[:, None]]
        token_rows = np.repeat(np.arange(len(chunks)), lengths)
        first_tokens = np.cumsum(lengths) - lengths
        offsets = np.arange(lengths.sum()) - first_tokens[token_rows] + starts[token_rows]
        slots = tables[token_rows, offsets // self.block_size].astype(np.int64) * self.block_size + offsets % self.block_size
        return AttentionLayout(
            qo_indptr_cpu=offsets_of(torch.from_numpy(lengths)),
            kv_lens_cpu=torch.from_numpy(kv_lens.astype(np.int32)),
            page_indptr_cpu=offsets_of(torch.from_numpy(num_pages)),
            pages=staging.put(pages),
            slot_mapping_T=staging.put(slots),
            num_prefill_rows=num_prefill_rows,
        )


def is_decode(chunk: Chunk) -> bool:
    """A row whose one input token is the last one drawn. The plan puts these last."""
    return chunk.sample and chunk.length == 1 and not chunk.visual


def _visual_slices(prefills: Sequence[Chunk], images: Mapping[int, torch.Tensor]) -> tuple[VisualSlice, ...]:
    slices, first = [], 0
    for chunk in prefills:
        for ref in chunk.visual:
            slices.append(VisualSlice(first + ref.start - chunk.start, ref.length, ref.offset, images[ref.image_id]))
        first += chunk.length
    return tuple(slices)
