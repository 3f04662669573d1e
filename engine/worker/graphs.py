"""CUDA graphs of pure decode steps, one per padded batch size. Built by `build`, asked by the runner.

A graph reads its input tokens from the rows' last tokens and writes logits; sampling follows right behind it. Padding rows point at the
scratch row and the scratch block, so they touch nothing that anybody reads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.worker.rows import Rows, StepInputs
from models.batch import AttentionLayout, ForwardBatch
from models.layers.attention import AttentionBackend
from models.qwen3_vl import Qwen3VL

SMALL_SIZES = (1, 2, 4, 8)
SIZE_STEP = 8
WARM_UPS = 2

MakeBackend = Callable[[int], AttentionBackend]


@dataclass(frozen=True, slots=True)
class Graph:
    """One captured batch size with the tensors it reads and the logits it writes."""

    graph: torch.cuda.CUDAGraph
    attention: AttentionBackend
    rows_B: torch.Tensor
    positions_3B: torch.Tensor
    slots_B: torch.Tensor
    logits_BV: torch.Tensor


class DecodeGraphs:
    """Replays decode steps. `make_backend(size)` gives an attention backend with fixed buffers for exactly `size` rows."""

    def __init__(self, model: Qwen3VL, make_backend: MakeBackend, rows: Rows, scratch_block: int, max_num_seqs: int):
        self._model = model
        self._make_backend = make_backend
        self._rows = rows
        self._scratch_block = scratch_block
        self._sizes = [size for size in (*SMALL_SIZES, *range(16, max_num_seqs + SIZE_STEP, SIZE_STEP)) if size < max_num_seqs + SIZE_STEP]
        self._device = rows.last_token_R.device
        self._scratch_pages = torch.full((self._sizes[-1],), scratch_block, dtype=torch.int32, device=self._device)
        self._graphs: dict[int, Graph] = {}

    @torch.inference_mode()
    def capture(self) -> int:
        """Captures every size, largest first so that all share one memory pool. Returns their number."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size, pool)
        torch.cuda.synchronize(self._device)
        return len(self._graphs)

    def fits(self, inputs: StepInputs) -> bool:
        """Whether the step only decodes."""
        return inputs.batch.attention.num_prefill_rows == 0

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """(B, V) logits of the step's rows, valid until the next replay."""
        count = inputs.decode_rows.shape[0]
        size = next(size for size in self._sizes if size >= count)
        graph = self._graphs[size]
        graph.attention.plan(self._padded(inputs.batch.attention, size - count))
        graph.rows_B[:count].copy_(inputs.decode_rows)
        graph.positions_3B[:, :count].copy_(inputs.batch.positions_3T)
        graph.slots_B[:count].copy_(inputs.batch.attention.slot_mapping_T)
        if count < size:
            graph.rows_B[count:].fill_(self._scratch_row)
            graph.slots_B[count:].fill_(self._scratch_slot)
        graph.graph.replay()
        return graph.logits_BV[:count]

    @property
    def _scratch_row(self) -> int:
        return self._rows.last_token_R.shape[0] - 1

    @property
    def _scratch_slot(self) -> int:
        return self._scratch_block * self._rows.block_size

    def _padded(self, layout: AttentionLayout, padding: int) -> AttentionLayout:
        """The layout with `padding` more rows of one token in the scratch block."""
        if padding == 0:
            return layout
        ones = torch.arange(1, padding + 1, dtype=torch.int32)
        return AttentionLayout(
            qo_indptr_cpu=torch.cat([layout.qo_indptr_cpu, layout.qo_indptr_cpu[-1:] + ones]),
            kv_lens_cpu=torch.cat([layout.kv_lens_cpu, torch.ones_like(ones)]),
            page_indptr_cpu=torch.cat([layout.page_indptr_cpu, layout.page_indptr_cpu[-1:] + ones]),
            pages=torch.cat([layout.pages, self._scratch_pages[:padding]]),
            slot_mapping_T=layout.slot_mapping_T,
            num_prefill_rows=0,
        )

    def _capture(self, size: int, pool: object) -> Graph:
        rows_B = torch.full((size,), self._scratch_row, device=self._device)
        positions_3B = torch.zeros((3, size), dtype=torch.int64, device=self._device)
        slots_B = torch.full((size,), self._scratch_slot, device=self._device)
        empty = torch.zeros(1, dtype=torch.int32)
        layout = AttentionLayout(empty, empty[:0], empty, self._scratch_pages[:0], slots_B, 0)
        full = self._padded(layout, size)
        attention = self._make_backend(size)
        attention.plan(full)
        logits_indices = torch.arange(size, device=self._device)

        def decode() -> torch.Tensor:
            ids_B = self._rows.last_token_R[rows_B]
            logits_BV: torch.Tensor = self._model(ForwardBatch(ids_B, positions_3B, full, (), logits_indices), attention)
            return logits_BV

        for _ in range(WARM_UPS):
            decode()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
            logits_BV = decode()
        return Graph(graph, attention, rows_B, positions_3B, slots_B, logits_BV)
