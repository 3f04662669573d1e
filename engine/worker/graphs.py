"""CUDA graphs of steps with few tokens: decode rows, alone or beside a small chunk of prompts. Built by `build`, asked by the runner.

Without a graph a step costs the host hundreds of launches, which take longer than the device needs for a few hundred tokens. A graph has a
fixed shape: so many prompt tokens, then so many decode rows, which read their input from the rows' last tokens. A smaller step is padded:
prompt tokens with a row of its own, decode rows with rows of one token. Padding reads and writes the scratch row and the scratch block, so
it touches nothing that anybody reads.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.step_sizes import LARGEST_CHUNK, MIXED_DECODE_SIZES, chunk_sizes, sizes_up_to
from engine.worker.rows import Rows, StepInputs
from models.batch import AttentionLayout, ForwardBatch, VisualSlice, offsets_of
from models.layers.attention import AttentionBackend
from models.qwen3_vl import Qwen3VL

DECODE_SIZES = (1, 2, 4, *range(8, 129, 8))
MAX_PREFILL_ROWS = 8  # prompts whose chunks one graph takes
WARM_UPS = 2


class Shape(NamedTuple):
    """What a graph computes: prompt tokens first, then decode rows."""

    num_prefill_tokens: int
    num_decode_rows: int


MakeBackend = Callable[[int, int, int], AttentionBackend]
Replay = Callable[[], object]
Record = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Graph:
    """One captured shape with the tensors it reads and the logits it writes."""

    replay: Replay
    attention: AttentionBackend
    ids_P: torch.Tensor
    rows_D: torch.Tensor
    positions_3T: torch.Tensor
    slots_T: torch.Tensor
    logits_indices_S: torch.Tensor  # prompts' last tokens, the last of MAX_PREFILL_ROWS places, then every decode row
    logits_SV: torch.Tensor  # a view of what all graphs share


class StepGraphs:
    """Replays small steps.

    `make_backend(*shape, rows)` gives an attention backend with fixed buffers for a shape whose prompt tokens are of exactly `rows` rows.
    """

    def __init__(
        self, model: Qwen3VL, make_backend: MakeBackend, rows: Rows, scratch_block: int, max_num_seqs: int, record: Record | None = None
    ):
        self._model = model
        self._make_backend = make_backend
        self._rows = rows
        self._record = record or CudaRecorder()
        self._device = rows.last_token_R.device
        self._scratch_row = rows.last_token_R.shape[0] - 1
        self._scratch_slot = scratch_block * rows.block_size
        self._decode_sizes = sizes_up_to(DECODE_SIZES, max_num_seqs)
        self._chunk_sizes = {rows: chunk_sizes(rows) for rows in sizes_up_to(MIXED_DECODE_SIZES, max_num_seqs)}
        num_scratch = max(self._decode_sizes[-1], LARGEST_CHUNK)
        self._scratch_pages = torch.full((num_scratch,), scratch_block, dtype=torch.int32, device=self._device)
        shape = (model.config.num_visual_levels, LARGEST_CHUNK, model.config.text.hidden_size)
        self._embedding = torch.zeros(shape, dtype=model.dtype, device=self._device)  # of prompt tokens, as if all were an image's
        num_logits = MAX_PREFILL_ROWS + max(self._decode_sizes[-1], *self._chunk_sizes)
        self._logits = torch.zeros((num_logits, model.config.text.vocab_size), device=self._device)  # where all graphs write
        self._graphs: dict[Shape, Graph] = {}

    @torch.inference_mode()
    def capture(self) -> int:
        """Captures every shape, largest first so that all share one memory pool. Returns their number."""
        mixed = [Shape(tokens, rows) for rows, sizes in self._chunk_sizes.items() for tokens in sizes]
        for shape in sorted([*mixed, *(Shape(0, rows) for rows in self._decode_sizes)], key=sum, reverse=True):
            self._graphs[shape] = self._capture(shape)
        return len(self._graphs)

    def fits(self, inputs: StepInputs) -> bool:
        """Whether there is a graph for the step."""
        return inputs.batch.attention.num_prefill_rows <= MAX_PREFILL_ROWS and _num_prefill_tokens(inputs) <= LARGEST_CHUNK

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """(S, V) logits of the step's `logits_indices`, valid until the next replay."""
        batch, layout = inputs.batch, inputs.batch.attention
        num_prefill, num_decode = _num_prefill_tokens(inputs), inputs.decode_rows.shape[0]
        shape = self._shape_for(num_prefill, num_decode)
        graph = self._graphs[shape]
        graph.attention.plan(self._padded(layout, shape))
        decodes = slice(shape.num_prefill_tokens, shape.num_prefill_tokens + num_decode)
        graph.slots_T.fill_(self._scratch_slot)
        graph.rows_D.fill_(self._scratch_row)
        graph.rows_D[:num_decode].copy_(inputs.decode_rows)
        graph.positions_3T[:, decodes].copy_(batch.positions_3T[:, num_prefill:])
        graph.slots_T[decodes].copy_(layout.slot_mapping_T[num_prefill:])
        num_sampled = len(batch.logits_indices) - num_decode  # prompts that end in this step
        first = MAX_PREFILL_ROWS - num_sampled if num_prefill else 0
        if num_prefill:
            graph.ids_P[:num_prefill].copy_(batch.input_ids_T[:num_prefill])
            graph.positions_3T[:, :num_prefill].copy_(batch.positions_3T[:, :num_prefill])
            graph.slots_T[:num_prefill].copy_(layout.slot_mapping_T[:num_prefill])
            graph.logits_indices_S[first:MAX_PREFILL_ROWS].copy_(batch.logits_indices[:num_sampled])
            self._embed(batch, num_prefill)
        graph.replay()
        return graph.logits_SV[first : first + num_sampled + num_decode]

    def _shape_for(self, num_prefill: int, num_decode: int) -> Shape:
        if num_prefill == 0:
            return Shape(0, _round_up(self._decode_sizes, num_decode))
        rows = _round_up(self._chunk_sizes, num_decode)
        return Shape(_round_up(self._chunk_sizes[rows], num_prefill), rows)

    def _embed(self, batch: ForwardBatch, num_prefill: int) -> None:
        """Where the graph finds its prompt tokens: text as its embedding with nothing for DeepStack to add, image tokens as they are."""
        self._embedding[0, :num_prefill] = self._model.language_model.embed_tokens(batch.input_ids_T[:num_prefill])
        self._embedding[1:, :num_prefill] = 0
        for item in batch.visual:
            self._embedding[:, item.start : item.start + item.length] = item.embedding[:, item.offset : item.offset + item.length]

    def _padded(self, layout: AttentionLayout, shape: Shape) -> AttentionLayout:
        """The layout with the rows of `shape`: one takes the tokens that lack, further ones are empty; then decode rows of one token."""
        rows, num_decode = layout.num_prefill_rows, len(layout.kv_lens_cpu) - layout.num_prefill_rows
        num_pages = int(layout.page_indptr_cpu[rows])
        lacking = shape.num_prefill_tokens - int(layout.qo_indptr_cpu[rows])
        padding = shape.num_decode_rows - num_decode
        block_size = self._rows.block_size
        extra_rows = MAX_PREFILL_ROWS + 1 - rows if shape.num_prefill_tokens else 0
        extra = [lacking, *[0] * (extra_rows - 1)] if extra_rows else []
        extra_pages = [-(-length // block_size) for length in extra]

        def spliced(values: torch.Tensor, between: list[int], after: int) -> torch.Tensor:
            middle, end = torch.tensor(between, dtype=torch.int32), torch.full((padding,), after, dtype=torch.int32)
            return torch.cat([values[:rows], middle, values[rows:], end])

        kv_lens = spliced(layout.kv_lens_cpu, extra, 1)
        page_counts = spliced(layout.page_indptr_cpu.diff(), extra_pages, 1)
        scratch = self._scratch_pages[: sum(extra_pages)], self._scratch_pages[:padding]
        return AttentionLayout(
            qo_indptr_cpu=offsets_of(spliced(layout.qo_indptr_cpu.diff(), extra, 1)),
            kv_lens_cpu=kv_lens,
            page_indptr_cpu=offsets_of(page_counts),
            pages=torch.cat([layout.pages[:num_pages], scratch[0], layout.pages[num_pages:], scratch[1]]),
            slot_mapping_T=layout.slot_mapping_T,
            num_prefill_rows=rows + extra_rows,
        )

    def _capture(self, shape: Shape) -> Graph:
        tokens, decodes = shape
        num_rows = MAX_PREFILL_ROWS if tokens else 0
        ids_P = torch.zeros(tokens, dtype=torch.int64, device=self._device)
        rows_D = torch.full((decodes,), self._scratch_row, device=self._device)
        positions_3T = torch.zeros((3, tokens + decodes), dtype=torch.int64, device=self._device)
        slots_T = torch.full((tokens + decodes,), self._scratch_slot, device=self._device)
        logits_indices_S = torch.arange(tokens - num_rows, tokens + decodes, device=self._device)
        empty = torch.zeros(1, dtype=torch.int32)
        layout = self._padded(AttentionLayout(empty, empty[:0], empty, self._scratch_pages[:0], slots_T, 0), shape)
        attention = self._make_backend(*shape, layout.num_prefill_rows)
        attention.plan(layout)
        visual = (VisualSlice(0, tokens, 0, self._embedding),) if tokens else ()

        def forward() -> torch.Tensor:
            ids_T = torch.cat([ids_P, self._rows.last_token_R[rows_D]])
            batch = ForwardBatch(ids_T, positions_3T, layout, visual, logits_indices_S)
            return self._model(batch, attention, self._logits[: len(logits_indices_S)])

        replay, logits_SV = self._record(forward)
        return Graph(replay, attention, ids_P, rows_D, positions_3T, slots_T, logits_indices_S, logits_SV)


class CudaRecorder:
    """Makes CUDA graphs that share one memory pool, which is sound since their replays follow each other on one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """Returns how to run `forward` again, and where its result will be."""
        for _ in range(WARM_UPS):
            forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = forward()
        return graph.replay, result


def _num_prefill_tokens(inputs: StepInputs) -> int:
    return inputs.batch.input_ids_T.shape[0] - inputs.decode_rows.shape[0]


def _round_up(sizes: Iterable[int], count: int) -> int:
    """The first of ascending `sizes` that reaches `count`."""
    return next(size for size in sizes if size >= count)
