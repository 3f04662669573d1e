"""The engine without its processes: a real scheduler core and a real runner on a tiny model, in one thread. For tests of step logic."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
import torch

from engine.scheduler.adapters import AdapterDirectory
from engine.scheduler.blocks import BlockPool
from engine.scheduler.core import Proposer, SchedulerCore
from engine.scheduler.images import ImageDirectory
from engine.scheduler.request import Request
from engine.scheduler.state import Limits, State
from engine.wire.adapters import AdapterRead, AdapterRef
from engine.wire.arena import Arena, create_memfd
from engine.wire.config import MAX_HEAD_DRAFTS
from engine.wire.grammar import CompiledGrammar
from engine.wire.messages import (
    MAX_PROPOSED,
    EngineRequest,
    ImageSource,
    ImageSpan,
    Region,
    SamplingParams,
    StepResult,
    TokenLogprobs,
    for_adapter,
)
from engine.wire.stats import Stages
from engine.wire.step_sizes import CPU as CPU_SIZES
from engine.wire.step_sizes import StepSizes
from engine.worker.adapters import WorkerAdapters
from engine.worker.graphs import StepGraphs
from engine.worker.head import make_head
from engine.worker.images import ImageCache
from engine.worker.jpeg import ImageReader
from engine.worker.rows import Rows
from engine.worker.runner import Runner
from engine.worker.sampling.sampler import Sampler
from engine.worker.staging import Staging
from models.cache.layout import AttentionLayout
from models.cache.states import RowStates, Snapshots
from models.checkpoint.load import load_weights
from models.config.huggingface import read_config
from models.decoders.qwen3_vl import Qwen3VL
from models.demo import CHECKPOINT
from models.kernels.paged import allocate_pools
from models.kernels.reference.attention import TorchAttention
from models.kernels.reference.backend import TorchBackend
from models.kernels.reference.jpeg import PillowDecoder
from models.kernels.reference.sampling import TorchSampling
from models.parallel.group import TensorParallel
from tests.eventually import HANG_GUARD_S
from tests.unit.scheduler.invariants import check_core, check_state
from tests.unit.scheduler.simulation import Key, key_of

ARENA_BYTES = 1 << 24
MAX_PAGES = 1024  # of a step through a graph
CPU = torch.device("cpu")
TORCH = TorchBackend(CPU)


@dataclass(frozen=True)
class Picture:
    """A made-up image: uint8 (height, width, 3). With `jpeg`, the worker gets these bytes instead of the pixels."""

    name: bytes
    pixels: np.ndarray
    jpeg: bytes | None = None


def make_picture(seed: int, height: int, width: int) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Picture(f"{seed}-{height}-{width}".encode().ljust(32, b"."), pixels)


def load_model(folder: Path) -> Qwen3VL:
    config = read_config(folder)
    model = Qwen3VL(config, TensorParallel.single(), TORCH, torch.float32)
    load_weights(model, folder, lambda done, total: None)
    return model


def run_again(forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """What stands in for a CUDA graph: a replay computes the captured step again, from the same tensors into the same result."""
    result = forward()
    return lambda: result.copy_(forward()), result


class PlannedAttention(TorchAttention):
    max_pages = MAX_PAGES

    def plan_arrays(self, layout: AttentionLayout) -> tuple[np.ndarray, ...]:
        return layout.qo_indptr_cpu.numpy(), layout.kv_lens_cpu.numpy(), layout.page_indptr_cpu.numpy()

    def read_from(self, plan: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
        self._places = AttentionLayout(*plan, pages, torch.empty(0), 0)

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        self.plan(self._places)
        return super().run(layer, q_THK)


class Engine:
    """Requests in, token ids out. `num_steps` and the core's counters say how the work was done."""

    def __init__(
        self,
        model: Qwen3VL,
        *,
        num_blocks: int = 256,
        image_tokens: int = 4096,
        graphs: bool = False,
        sizes: StepSizes = CPU_SIZES,
        drafter: Proposer | None = None,
        depth: int = 1,  # plans in flight
        slots: WorkerAdapters | None = None,
        num_slots: int = 0,
        adapters_read: "SimpleQueue[AdapterRead] | None" = None,  # reports of `slots`
        **limits: int | bool,
    ):
        config, spec = model.config, model.cache_spec
        per_token = config.num_visual_levels * config.text.hidden_size * 4
        defaults: dict[str, object] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 8192,
            "max_num_mixed_tokens": 8192,
            "max_num_encoder_tokens": 4096,
            "mixed_step_tokens": 312,
            "bytes_per_image_token": per_token,
            "step_sizes": sizes,
            "snapshot_blocks": spec.snapshot_blocks(16),
            "num_lookahead": MAX_HEAD_DRAFTS if config.text.has_head else 0,
        }
        merged = Limits(**{**defaults, **limits})
        directory, blocks, places = ImageDirectory(image_tokens * per_token), BlockPool(num_blocks, 16), AdapterDirectory(num_slots, 1)
        state = State(merged, blocks, directory, places, free_rows=list(range(merged.max_num_seqs)))
        self.core = SchedulerCore(state, 1, 100_000, frozenset(config.eos_token_ids), proposer=drafter)
        self._arena = Arena(create_memfd("test", ARENA_BYTES), ARENA_BYTES)
        tp = TensorParallel.single()
        pools = allocate_pools(spec.paged, num_blocks + 1, 16, torch.float32, CPU)
        states = tuple(RowStates(group, merged.max_num_seqs, CPU, MAX_PROPOSED) for group in spec.states)
        hidden_TX = torch.zeros((merged.max_num_batched_tokens + 256, config.text.head_input_size)) if config.text.has_head else None
        kept = states, Snapshots(pools, states) if states else None, hidden_TX, num_blocks
        rows = Rows(merged.max_num_seqs, 1024, 16, config.geometry, CPU, 0, *kept)
        images = ImageCache(model.tower, ImageReader(self._arena, PillowDecoder(1, CPU), CPU), tp, adapters=slots)
        attention = TORCH.attention(pools, config.text.num_heads)
        num_seqs, max_samples = merged.max_num_seqs, (1 + MAX_PROPOSED) * merged.max_num_seqs
        recorder = lambda _: PlannedAttention(pools), rows, sizes, max_samples, run_again, num_slots > 0
        self.graphs = StepGraphs(model, *recorder) if graphs else None
        if self.graphs is not None:
            self.graphs.capture()
        sampler = Sampler(TorchSampling(), num_seqs, max_samples, config, CHECKPOINT, CPU)
        head = make_head(model, attention, rows, 1 << 20, self.graphs) if config.text.has_head else None
        staging, more = Staging(1 << 22, CPU), {"head": head, "adapters": slots}
        self._runner = Runner(model, attention, rows, sampler, images, staging, self.graphs, self._arena, tp, **more)
        self._config, self._is_free = config, drafter is None
        self._slots, self._adapters_read = slots, adapters_read or SimpleQueue()
        self._num_reading, self.awaits_adapters = 0, True  # else they are read concurrently with steps, as in the product
        self._depth, self._results = depth, deque[StepResult]()
        self.tokens: dict[Key, list[int]] = {}
        self.errors: dict[int, str] = {}
        self.logprobs: dict[Key, list[TokenLogprobs]] = {}
        self.reports: dict[Key, Any] = {}
        self.propose: Callable[[Request], tuple[int, ...]] = lambda request: ()  # drafts for the next step

    def add(
        self,
        rid: int,
        parts: Sequence[list[int] | Picture],
        max_tokens: int = 8,
        n: int = 1,
        grammar: bytes | None = None,
        after: int | None = None,
        adapter: AdapterRef | None = None,
        **params: object,
    ) -> None:
        """`parts`: token ids and pictures in the order of the prompt. Answers behind the first one are called (rid, index)."""
        ids: list[int] = []
        spans: list[ImageSpan] = []
        geometry = self._config.geometry
        for part in parts:
            if isinstance(part, Picture):
                height, width = part.pixels.shape[:2]
                grid = geometry.grid(height, width)
                encoding: Literal["rgb", "jpeg"] = "rgb" if part.jpeg is None else "jpeg"
                source = ImageSource(encoding, self._store(part.jpeg or part.pixels.tobytes()), height, width)
                spans.append(for_adapter(ImageSpan(part.name, len(ids), geometry.num_tokens(grid), grid, source), adapter))
                ids += [self._config.placeholder_ids["image"]] * geometry.num_tokens(grid)
            else:
                ids += part
        prompt = np.asarray(ids, dtype=np.int32)
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **params})
        rules = None if grammar is None else CompiledGrammar(self._store(grammar), after)
        wire = EngineRequest(rid, self._store(prompt.tobytes()), spans, sampling, Stages(), n=n, grammar=rules, adapter=adapter)
        self.core.add(wire, prompt)
        for index in range(n):
            self.tokens[key_of(rid, index)], self.logprobs[key_of(rid, index)] = [], []

    def step(self) -> bool:
        for request in self.core.state.running if self._is_free else ():
            request.proposed = self.propose(request) if request.is_decoding else ()
        while len(self._results) < self._depth and (step := self.core.next_step()) is not None:
            self._results.append(self._runner.launch(step.plan).result())
        for order in self.core.state.adapters.take_reads():
            self._slots.read(order)
            self._num_reading += 1
        if self._num_reading and (self.awaits_adapters or not self._results):
            self.core.take(self._adapters_read.get(timeout=HANG_GUARD_S))
            self._num_reading -= 1
            self._take()
            return not self.awaits_adapters or self.step()
        if not self._results:
            return False
        self.core.collect(self._results.popleft())
        check_state(self.core.state)
        self._take()
        return True

    def _take(self) -> None:
        for output in self.core.take_outputs(None, 0.0).outputs:
            key = key_of(output.rid, output.index)
            self.tokens[key] += output.token_ids
            self.logprobs[key] += output.logprobs
            if output.report is not None:
                self.reports[key] = output.report
            if output.error is not None:
                self.errors[output.rid] = output.error.message

    def run(self) -> dict[Key, list[int]]:
        while self.step():
            pass
        check_core(self.core)
        return self.tokens

    def _store(self, data: bytes) -> Region:
        offset = self._arena.alloc(len(data))
        self._arena.view(offset, len(data))[:] = data
        return Region(1, offset, len(data))
