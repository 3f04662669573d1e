"""CUDA graphs of steps with few tokens: decode rows, alone or with a chunk of prompts.

Without a graph a step costs the host hundreds of launches, which take longer than the device needs for a few hundred tokens, or thousands
if a rank's part of the model is small. A graph has a fixed shape: a number of prompt tokens, then of tokens of decode rows. The number of
tokens per row is not fixed by a graph: a graph for 8 tokens takes 8 decoding rows of one token, or two of 4. A smaller step is padded:
prompt tokens with their own row, others with rows of one token and empty rows. Padding accesses only the scratch row and the scratch block.

All inputs of a graph are padded on the host and copied at once to memory that all graphs share. The layout is fixed for a shape, with
variable-length data after the pages. Steps of tokens with adapters have graphs of their own, whose inputs include the adapters' slots:

    ids_P | gather_D | positions_3T | slots_T | logits_indices_S | adapters_T | rows of states | plan of the attention | pages ... | ...
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.worker.rows import HostStep, Rows
from engine.worker.sampling.samples import BYTES_PER_SAMPLE, Int64s, Samples
from engine.worker.staging import Staging, staged_bytes
from models.cache.layout import AttentionLayout, offsets_of
from models.decoders.batch import ForwardBatch, VisualSlice
from models.decoders.contract import LanguageModel
from models.kernels.paged import Int32s, MakeFixed, PagedAttention
from models.kernels.step_sizes import StepSizes

MAX_PREFILL_ROWS = 8  # most prompts with chunks in one graph
FIRST_WARM_UPS = 3  # of the first graph; others need one, for their own kernels
PAGE_BYTES = 4
BYTES_AFTER_PAGES = BYTES_PER_SAMPLE + 16  # per token: sampling parameters, known ids
SLACK = 4096  # for alignment


class Shape(NamedTuple):
    """Size of a graph: prompt tokens, then tokens of decode rows."""

    num_prefill_tokens: int
    num_decode_tokens: int


UNPADDED = Shape(0, 1)  # no smaller shape exists
Key = tuple[Shape, bool]  # second: whether tokens have adapters

Replay = Callable[[], object]
Record = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Graph:
    replay: Replay
    attention: PagedAttention
    logits_SV: torch.Tensor  # view of the shared logits: prompts' last tokens (`StepGraphs._pad`), then all tokens of decode rows


class StepGraphs:
    """Replayer of small steps with up to `max_samples` tokens of decode rows. `make_attention(*shape, rows)` returns attention for
    a shape whose prompt tokens have exactly `rows` rows."""

    def __init__(
        self,
        model: LanguageModel,
        make_attention: MakeFixed,
        rows: Rows,
        sizes: StepSizes,
        max_num_seqs: int,
        max_samples: int,
        record: Record | None = None,
        has_adapters: bool = False,
    ):
        self._model = model
        self.make_attention = make_attention
        self._rows = rows
        self.record = record or CudaRecorder()
        self._device = rows.last_tokens.device
        self.decode_sizes = sizes.up_to(sizes.decodes, max_samples)
        self._chunk_sizes = sizes.chunks_by_rows(max_num_seqs)
        largest_prompt = max((chunks[-1] for chunks in self._chunk_sizes.values()), default=0)
        shape = (model.config.num_visual_levels, largest_prompt, model.config.text.hidden_size)
        self._embedding = torch.zeros(shape, dtype=model.dtype, device=self._device)  # of prompt tokens: graphs treat all as image tokens
        num_logits = MAX_PREFILL_ROWS + max([self.decode_sizes[-1], *self._chunk_sizes])
        self._logits = torch.zeros((num_logits, model.config.text.vocab_size), device=self._device)  # output of all graphs
        self._hidden = torch.zeros((num_logits, model.config.text.hidden_size), dtype=model.dtype, device=self._device)
        self._staging = Staging(0, self._device)
        self._graphs: dict[Key, Graph] = {}
        self._kinds = (False, True) if has_adapters else (False,)

    @torch.inference_mode()
    def capture(self) -> int:
        """Capture every shape, the largest first so that all share one memory pool. Return their number."""
        mixed = [Shape(tokens, rows) for rows, sizes in self._chunk_sizes.items() for tokens in sizes]
        shapes = sorted([*mixed, *(Shape(0, rows) for rows in self.decode_sizes)], key=sum, reverse=True)
        keys = [(shape, kind) for shape in shapes for kind in self._kinds]
        backends = {key: self.make_attention(*key[0], _num_prefill_rows(key[0])) for key in keys}
        fixed = max(staged_bytes(self._fixed_arrays(self._pad(HostStep.empty(), *key), backend)) for key, backend in backends.items())
        pages = PAGE_BYTES * max(backend.max_pages for backend in backends.values())
        num_bytes = fixed + pages + BYTES_AFTER_PAGES * len(self._rows.last_tokens) + SLACK
        self._staging = Staging(num_bytes, self._device, self._rows.transfers)
        for key, backend in backends.items():
            self._graphs[key] = self._capture(*key, backend)
        return len(self._graphs)

    def fits(self, step: HostStep) -> bool:
        """Return whether there is a graph for the step."""
        if step.reports.tokens and len(step.ids):
            return False
        num_prompts, num_prompt_tokens, num_decode = step.attention.num_prefill_rows, len(step.ids), len(step.gather)
        if not num_prompts:
            return num_decode <= self.decode_sizes[-1]
        if num_prompts > MAX_PREFILL_ROWS or not self._chunk_sizes or num_decode > max(self._chunk_sizes):
            return False
        return num_prompt_tokens <= self._chunk_sizes[round_up(self._chunk_sizes, num_decode)][-1]

    def run(self, step: HostStep) -> tuple[torch.Tensor, torch.Tensor, Samples]:
        """Return (S, V) logits and (S, D) final hidden states of the step's `logits_indices`, valid until the next replay, and the sampling
        inputs. At most as many steps may be in flight as `Staging` allows."""
        shape = self._shape_for(len(step.ids), len(step.gather))
        has_adapters = len(step.adapters) > 0
        graph, padded = self._graphs[shape, has_adapters], self._pad(step, shape, has_adapters)
        self._staging.begin()
        ids_P, *_ = [self._staging.put(array) for array in self._fixed_arrays(padded, graph.attention)]
        self._staging.put(padded.attention.pages.numpy())
        samples, known = step.samples.stage(self._staging), self._staging.put(step.known)
        self._staging.copy()
        self._rows.remember(known)
        if len(step.ids):
            self._embed(ids_P[: len(step.ids)], step.visual)
        graph.replay()
        first = _num_prompt_ends(shape) - (len(step.logits_indices) - len(step.gather))
        wanted = slice(first, first + len(step.logits_indices))
        return graph.logits_SV[wanted], self._hidden[wanted], samples

    def indices_of(self, step: HostStep) -> Int64s:
        num_prefill, num_decode = len(step.ids), len(step.gather)
        tokens = self._shape_for(num_prefill, num_decode).num_prefill_tokens
        return np.concatenate((np.arange(num_prefill), np.arange(tokens, tokens + num_decode)))

    def _shape_for(self, num_prefill: int, num_decode: int) -> Shape:
        if num_prefill == 0:
            return Shape(0, round_up(self.decode_sizes, num_decode))
        padded = round_up(self._chunk_sizes, num_decode)
        return Shape(round_up(self._chunk_sizes[padded], num_prefill), padded)

    def _embed(self, ids_P: torch.Tensor, visual: Sequence[VisualSlice]) -> None:
        """Fill the embeddings of the graph's prompt tokens: text with zeros for the DeepStack levels, images with all levels."""
        self._embedding[0, : len(ids_P)] = self._model.embed(ids_P)
        self._embedding[1:, : len(ids_P)] = 0
        for item in visual:
            self._embedding[:, item.tokens] = item.embedding[:, item.offset : item.offset + item.length]

    def _pad(self, step: HostStep, shape: Shape, has_adapters: bool) -> HostStep:
        """Pad the step to the tokens and rows of `shape`, with its prompts' ends in the last MAX_PREFILL_ROWS logits indices."""
        tokens, size = shape
        num_prefill, num_decode = len(step.ids), len(step.gather)
        if len(step.rows) == num_decode == size and not tokens:
            return step
        ids_P, gather_D = np.zeros(tokens, dtype=np.int64), np.full(size, self._rows.scratch_row, dtype=np.int64)
        ids_P[:num_prefill], gather_D[:num_decode] = step.ids, step.gather
        num_prompts, first_decode = step.attention.num_prefill_rows, _num_prefill_rows(shape)
        rows_R = np.full(first_decode + size, self._rows.scratch_row, dtype=np.int64)
        rows_R[:num_prompts] = step.rows[:num_prompts]
        rows_R[first_decode : first_decode + len(step.rows) - num_prompts] = step.rows[num_prompts:]
        real = np.concatenate((np.arange(num_prefill), np.arange(tokens, tokens + num_decode)))  # see `indices_of`
        slots_T = np.full(tokens + size, self._rows.scratch_slot, dtype=np.int64)
        positions_3T = np.zeros((3, tokens + size), dtype=np.int64)
        slots_T[real], positions_3T[:, real] = step.attention.slot_mapping_T.numpy(), step.positions
        adapters_T = np.full(tokens + size if has_adapters else 0, -1, dtype=np.int32)
        if len(step.adapters):
            adapters_T[real] = step.adapters
        last, num_ends = _num_prompt_ends(shape), len(step.logits_indices) - num_decode
        logits_indices_S = np.arange(tokens - last, tokens + size)
        logits_indices_S[last - num_ends : last] = step.logits_indices[:num_ends]
        layout = replace(pad_layout(step.attention, shape, self._rows), slot_mapping_T=torch.from_numpy(slots_T))
        step = replace(step, ids=ids_P, gather=gather_D, rows=rows_R, positions=positions_3T, adapters=adapters_T)
        return replace(step, attention=layout, logits_indices=logits_indices_S)

    def _capture(self, shape: Shape, has_adapters: bool, attention: PagedAttention) -> Graph:
        padded = self._pad(HostStep.empty(), shape, has_adapters)
        self._staging.begin()
        fixed = [self._staging.put(array) for array in self._fixed_arrays(padded, attention)]
        ids_P, gather_D, positions_3T, slots_T, logits_indices_S, adapters_T, *rest = fixed
        num_states = len(self._rows.state_arrays(padded))
        rows, plan = self._rows.state_rows(rest[:num_states], padded.attention.num_prefill_rows), rest[num_states:]
        pages = self._staging.rest(torch.int32)
        self._staging.put(padded.attention.pages.numpy())
        self._staging.copy()
        attention.read_from(plan, pages)
        layout = replace(padded.attention, pages=pages, slot_mapping_T=slots_T)
        visual = (VisualSlice(0, len(ids_P), 0, self._embedding),) if len(ids_P) else ()

        def forward() -> torch.Tensor:
            sampled = self._rows.last_tokens[gather_D]
            ids_T = torch.cat([ids_P, sampled]) if len(ids_P) else sampled
            states, padding_slot = self._rows.states, None if shape == UNPADDED else self._rows.scratch_slot
            of_step = layout, visual, logits_indices_S, states, rows, padding_slot, self._rows.hidden_of(len(ids_T))
            batch = ForwardBatch(ids_T, positions_3T, *of_step, adapters_T=adapters_T if len(adapters_T) else None)
            hidden_SD = self._model(batch, attention)
            logits_SV = self._model.logits(hidden_SD, self._logits[: len(hidden_SD)])
            self._hidden[: len(hidden_SD)].copy_(hidden_SD)  # after the logits: a copy between norm and product would prevent their overlap
            return logits_SV

        replay, logits_SV = self.record(forward)
        return Graph(replay, attention, logits_SV)

    def _fixed_arrays(self, padded: HostStep, attention: PagedAttention) -> list[npt.NDArray[np.integer]]:
        layout = padded.attention
        step: tuple[Int64s, ...] = padded.ids, padded.gather, padded.positions, layout.slot_mapping_T.numpy(), padded.logits_indices
        return [*step, padded.adapters, *self._rows.state_arrays(padded), *attention.plan_arrays(layout)]


def pad_layout(layout: AttentionLayout, shape: Shape, of: Rows) -> AttentionLayout:
    """Pad the layout to `shape`: after the prompts' rows one row with the padding tokens and empty rows, after the decode rows rows of
    one token and empty rows."""
    rows, starts, page_starts = layout.num_prefill_rows, layout.qo_indptr_cpu.numpy(), layout.page_indptr_cpu.numpy()
    lengths = np.zeros(_num_prefill_rows(shape) - rows, dtype=np.int32)  # rows between the prompts and the decode rows
    lengths[:1] = shape.num_prefill_tokens - starts[rows]
    padding = np.zeros(shape.num_decode_tokens - (len(starts) - 1 - rows), dtype=np.int32)  # rows after the decode rows
    padding[: shape.num_decode_tokens - (starts[-1] - starts[rows])] = 1
    page_counts = -(-lengths // of.block_size)
    scratch = np.full(page_counts.sum(), of.scratch_block, dtype=np.int32)

    def spliced(values: Int32s, index: int, between: Int32s, last: Int32s) -> Int32s:
        return np.concatenate((values[:index], between, values[index:], last))

    pages = spliced(layout.pages.numpy(), page_starts[rows], scratch, np.full(padding.sum(), of.scratch_block, dtype=np.int32))
    return AttentionLayout(
        qo_indptr_cpu=offsets_of(spliced(np.diff(starts), rows, lengths, padding)),
        kv_lens_cpu=torch.from_numpy(spliced(layout.kv_lens_cpu.numpy(), rows, lengths, padding)),
        page_indptr_cpu=offsets_of(spliced(np.diff(page_starts), rows, page_counts, padding)),
        pages=torch.from_numpy(pages),
        slot_mapping_T=layout.slot_mapping_T,
        num_prefill_rows=rows + len(lengths),
    )


class CudaRecorder:
    """Recorder of CUDA graphs that share one memory pool: safe because their replays are sequential on one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._num_warm_ups = FIRST_WARM_UPS

    def __call__(self, forward: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """Capture `forward`; return the replay function and its output."""
        for _ in range(self._num_warm_ups):
            forward()
        self._num_warm_ups = 1
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = forward()
        return graph.replay, result


def _num_prefill_rows(shape: Shape) -> int:
    return MAX_PREFILL_ROWS + 1 if shape.num_prefill_tokens else 0


def _num_prompt_ends(shape: Shape) -> int:
    """Number of prompts' last tokens in the graph's logits."""
    return MAX_PREFILL_ROWS if shape.num_prefill_tokens else 0


def round_up(sizes: Iterable[int], count: int) -> int:
    return next(size for size in sizes if size >= count)
