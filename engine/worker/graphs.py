"""CUDA graphs of steps with few tokens of decode rows.

Without a graph a step costs the host milliseconds. A graph has a fixed number of tokens, but not of tokens per row: a graph for 8 tokens
takes 8 decoding rows of one token, or two of 4. A smaller step is padded with rows of one token and empty rows. Padding accesses only the
scratch row and the scratch block.

All inputs of a graph are padded on the host and copied at once to memory that all graphs share. The layout is fixed for a size, with
variable-length data after the pages. Steps of tokens with adapters have graphs of their own, whose inputs include the adapters' slots:

    gather_D | positions_3D | slots_D | adapters_D | rows of states | plan of the attention | pages ... | ...
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from engine.wire.step_sizes import StepSizes
from engine.worker.rows import HostStep, Rows
from engine.worker.sampling.samples import BYTES_PER_SAMPLE, Int64s, Samples
from engine.worker.staging import Staging, staged_bytes
from models.cache.layout import AttentionLayout
from models.decoders.batch import ForwardBatch
from models.decoders.contract import LanguageModel
from models.kernels.paged import MakeFixed, PagedAttention

FIRST_WARM_UPS = 3  # of the first graph; others need one, for their own kernels
PAGE_BYTES = 4
BYTES_AFTER_PAGES = BYTES_PER_SAMPLE + 16  # per token: sampling parameters, known ids
SLACK = 4096  # for alignment

Key = tuple[int, bool]  # tokens, whether they have adapters

Replay = Callable[[], object]
Record = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Graph:
    replay: Replay
    attention: PagedAttention
    logits_DV: torch.Tensor  # view of the shared logits


class StepGraphs:
    """Replayer of steps with up to `max_samples` tokens of decode rows. `make_attention(size)` returns attention for so many."""

    def __init__(
        self,
        model: LanguageModel,
        make_attention: MakeFixed,
        rows: Rows,
        sizes: StepSizes,
        max_samples: int,
        record: Record | None = None,
        has_adapters: bool = False,
    ):
        self._model = model
        self.make_attention = make_attention
        self._rows = rows
        self.record = record or CudaRecorder()
        self._device = rows.last_tokens.device
        self.sizes = sizes.graph_sizes(max_samples)
        self._logits = torch.zeros((self.sizes[-1], model.config.text.vocab_size), device=self._device)  # output of all graphs
        self._hidden = torch.zeros((self.sizes[-1], model.config.text.hidden_size), dtype=model.dtype, device=self._device)
        self._staging = Staging(0, self._device)
        self._graphs: dict[Key, Graph] = {}
        self._kinds = (False, True) if has_adapters else (False,)

    @torch.inference_mode()
    def capture(self) -> int:
        """Capture every size, the largest first so that all share one memory pool. Return their number."""
        keys = [(size, kind) for size in self.sizes[::-1] for kind in self._kinds]
        backends = {key: self.make_attention(key[0]) for key in keys}
        fixed = max(staged_bytes(self._fixed_arrays(self._pad(HostStep.empty(), *key), backend)) for key, backend in backends.items())
        pages = PAGE_BYTES * max(backend.max_pages for backend in backends.values())
        num_bytes = fixed + pages + BYTES_AFTER_PAGES * len(self._rows.last_tokens) + SLACK
        self._staging = Staging(num_bytes, self._device, self._rows.transfers)
        for key, backend in backends.items():
            self._graphs[key] = self._capture(*key, backend)
        return len(self._graphs)

    def fits(self, step: HostStep) -> bool:
        """Return whether there is a graph for the step."""
        return not step.attention.num_prefill_rows and len(step.gather) <= self.sizes[-1]

    def run(self, step: HostStep) -> tuple[torch.Tensor, torch.Tensor, Samples]:
        """Return (D, V) logits and (D, X) final hidden states of the step's tokens, valid until the next replay, and the sampling inputs.
        At most as many steps may be in flight as `Staging` allows."""
        key = round_up(self.sizes, len(step.gather)), len(step.adapters) > 0
        graph, padded = self._graphs[key], self._pad(step, *key)
        self._staging.begin()
        for array in (*self._fixed_arrays(padded, graph.attention), padded.attention.pages.numpy()):
            self._staging.write(array)
        known = self._staging.put(step.known)
        self._staging.copy()
        self._rows.remember(known)
        graph.replay()
        samples = step.samples.stage(self._staging)  # while the graph runs
        self._staging.copy()
        wanted = slice(0, len(step.gather))
        return graph.logits_DV[wanted], self._hidden[wanted], samples

    def _pad(self, step: HostStep, size: int, has_adapters: bool) -> HostStep:
        """Pad the step to so many tokens and rows."""
        num_decode = len(step.gather)
        if len(step.rows) == num_decode == size:
            return step
        gather_D, rows_R = (np.full(size, self._rows.scratch_row, dtype=np.int64) for _ in range(2))
        gather_D[:num_decode], rows_R[: len(step.rows)] = step.gather, step.rows
        slots_D = np.full(size, self._rows.scratch_slot, dtype=np.int64)
        positions_3D = np.zeros((3, size), dtype=np.int64)
        slots_D[:num_decode], positions_3D[:, :num_decode] = step.attention.slot_mapping_T.numpy(), step.positions
        adapters_D = np.full(size if has_adapters else 0, -1, dtype=np.int32)
        adapters_D[: len(step.adapters)] = step.adapters
        layout = replace(pad_layout(step.attention, size, self._rows), slot_mapping_T=torch.from_numpy(slots_D))
        return replace(step, gather=gather_D, rows=rows_R, positions=positions_3D, adapters=adapters_D, attention=layout)

    def _capture(self, size: int, has_adapters: bool, attention: PagedAttention) -> Graph:
        padded = self._pad(HostStep.empty(), size, has_adapters)
        self._staging.begin()
        fixed = [self._staging.put(array) for array in self._fixed_arrays(padded, attention)]
        gather_D, positions_3D, slots_D, adapters_D, *rest = fixed
        num_states = len(self._rows.state_arrays(padded))
        rows, plan = self._rows.state_rows(rest[:num_states], 0), rest[num_states:]
        pages = self._staging.rest(torch.int32)
        self._staging.put(padded.attention.pages.numpy())
        self._staging.copy()
        attention.read_from(plan, pages)
        layout = replace(padded.attention, pages=pages, slot_mapping_T=slots_D)
        every = torch.arange(size, device=self._device)

        def forward() -> torch.Tensor:
            padding_slot = None if size == 1 else self._rows.scratch_slot  # no step is smaller
            of_step = layout, (), every, self._rows.states, rows, padding_slot, self._rows.hidden_of(size)
            ids_D, adapters = self._rows.last_tokens[gather_D], adapters_D if len(adapters_D) else None
            hidden_DX = self._model(ForwardBatch(ids_D, positions_3D, *of_step, adapters_T=adapters), attention)
            logits_DV = self._model.logits(hidden_DX, self._logits[:size])
            self._hidden[:size].copy_(hidden_DX)  # after the logits: a copy between norm and product would prevent their overlap
            return logits_DV

        replay, logits_DV = self.record(forward)
        return Graph(replay, attention, logits_DV)

    def _fixed_arrays(self, padded: HostStep, attention: PagedAttention) -> list[npt.NDArray[np.integer]]:
        layout = padded.attention
        step: tuple[Int64s, ...] = padded.gather, padded.positions, layout.slot_mapping_T.numpy()
        return [*step, padded.adapters, *self._rows.state_arrays(padded), *attention.plan_arrays(layout)]


def pad_layout(layout: AttentionLayout, size: int, of: Rows) -> AttentionLayout:
    """Pad the layout of decode rows to `size` rows and tokens: rows of one token, then empty rows."""
    starts, page_starts = layout.qo_indptr_cpu.numpy(), layout.page_indptr_cpu.numpy()
    num_rows, num_tokens = size + 1 - len(starts), size - int(starts[-1])
    ends = np.arange(1, num_rows + 1, dtype=np.int32).clip(max=num_tokens)
    scratch = np.full(num_tokens, of.scratch_block, dtype=np.int32)
    before = layout.kv_lens_cpu.numpy(), layout.pages.numpy()
    kv_lens, pages = (np.concatenate(pair) for pair in zip(before, (np.arange(num_rows) < num_tokens, scratch), strict=True))
    return AttentionLayout(
        qo_indptr_cpu=torch.from_numpy(np.concatenate((starts, starts[-1] + ends))),
        kv_lens_cpu=torch.from_numpy(kv_lens),
        page_indptr_cpu=torch.from_numpy(np.concatenate((page_starts, page_starts[-1] + ends))),
        pages=torch.from_numpy(pages),
        slot_mapping_T=layout.slot_mapping_T,
        num_prefill_rows=0,
    )


class CudaRecorder:
    """Recorder of CUDA graphs that share one memory pool: safe because their replays are sequential on one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._num_warm_ups = FIRST_WARM_UPS

    def __call__(self, forward: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """Capture `forward`; return the replay function and its output."""
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.default_stream()):  # where layers are not repeated, which `warm_up_steps` checks later
            for _ in range(self._num_warm_ups):
                forward()
        self._num_warm_ups = 1
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = forward()
        return graph.replay, result


def round_up(sizes: Iterable[int], count: int) -> int:
    return next(size for size in sizes if size >= count)
