"""Profile of one request with many images in one process: lists the longest idle gaps of the GPU.

    python -m bench profile --images 32 --resolution 720p

The scheduler core and the runner are the real ones, with two steps in flight; weights are dummies of the 8B shape. Needs a GPU.
"""

import tempfile
from collections import deque
from pathlib import Path

import numpy as np
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from bench.flags import make_parser
from bench.pictures import RESOLUTIONS, make_jpegs
from bench.report import environment, table, write_json
from engine.launch.config import GIB, EngineConfig
from engine.launch.memory import sizes_for
from engine.scheduler.blocks import BlockPool
from engine.scheduler.core import SchedulerCore
from engine.scheduler.images import ImageDirectory
from engine.scheduler.main import make_limits
from engine.scheduler.state import State
from engine.wire.arena import Arena, create_memfd
from engine.wire.messages import (
    PROCESSOR_ARENA,
    EngineRequest,
    ImageSource,
    ImageSpan,
    Region,
    SamplingParams,
    WorkerReady,
)
from engine.wire.stats import Stages
from engine.worker.build import make_graphs
from engine.worker.images import ImageCache
from engine.worker.jpeg import ImageReader
from engine.worker.rows import Rows
from engine.worker.runner import LaunchedStep, Runner
from engine.worker.sampling.sampler import Sampler
from engine.worker.staging import Staging
from models.checkpoint.load import init_dummy_weights
from models.config.huggingface import read_config
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.hopper.tuned import STEP_SIZES as HOPPER_STEP_SIZES
from models.kernels.make import make_backend
from models.kernels.paged import allocate_pools
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder

ARENA_BYTES = 1 * GIB
NUM_BLOCKS = 8192
TEXT_TOKENS = 256
TEXT_ID = 5


class Bench:
    """A core and a runner on one GPU; `prefill` runs one request to its first token."""

    def __init__(self, shape: str) -> None:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        self._config = EngineConfig()
        with tempfile.TemporaryDirectory() as folder:
            write_model_folder(Path(folder), SHAPES[shape], weights="none", seed=0)
            self._model_config = read_config(Path(folder))
        model_config, tp = self._model_config, TensorParallel.single()
        backend = make_backend("hopper", device)
        backend.load(model_config.text.heads(1), model_config.vision_head_dim)
        decoder = backend.jpeg_decoder(self._config.processing_pool_size, "auto")
        model = Qwen3VL(model_config, tp, backend, torch.bfloat16)
        init_dummy_weights(model, seed=0)
        self._arena = Arena(create_memfd("bench", ARENA_BYTES), ARENA_BYTES)
        pools = allocate_pools(model.cache_spec.paged, NUM_BLOCKS + 1, self._config.block_size, torch.bfloat16, device)
        num_seqs, vocab_size = self._config.max_num_seqs, model_config.text.vocab_size
        sampling = backend.sampling(num_seqs, vocab_size)
        sampler = Sampler(sampling, num_seqs, num_seqs, model_config, Path(), device)
        row_sizes = num_seqs, NUM_BLOCKS, self._config.block_size
        rows = Rows(*row_sizes, model_config.geometry, device, sampling.max_top_k)
        images = ImageCache(model.tower, ImageReader(self._arena, decoder, device), tp, torch.cuda.Stream(device))
        attention = backend.attention(pools, model_config.text.num_heads)
        sizes = sizes_for(self._config, model_config.text, model.cache_spec, backend.step_sizes)
        graphs = make_graphs(model, backend, pools, rows, sizes, self._config, NUM_BLOCKS)
        assert graphs is not None
        graphs.capture()
        self._runner = Runner(model, attention, rows, sampler, images, Staging(64 << 20, device), graphs, self._arena, tp)
        per_token = model_config.num_visual_levels * model_config.text.hidden_size * 2
        limits = make_limits(self._config, WorkerReady(0, NUM_BLOCKS, 4 * GIB, per_token, HOPPER_STEP_SIZES))
        blocks, directory = BlockPool(NUM_BLOCKS, self._config.block_size), ImageDirectory(4 * GIB)
        state = State(limits, blocks, directory, free_rows=list(range(limits.max_num_seqs)))
        self._core = SchedulerCore(state, 1, model_config.text.max_position_embeddings, frozenset())

    def prefill(self, rid: int, jpegs: list[bytes], resolution: str) -> None:
        """Run a prefill, planning two steps in advance as scheduler and worker do, then the worker's idle work."""
        self._core.add(*self._request(rid, jpegs, resolution))
        pending: deque[LaunchedStep] = deque()
        while self._core.num_requests:
            while self._core.num_in_flight < self._core.depth and (step := self._core.next_step()) is not None:
                pending.append(self._runner.launch(step.plan))
            self._core.collect(pending.popleft().result())
        while self._runner.use_spare_time(is_busy=False):
            pass

    def _request(self, rid: int, jpegs: list[bytes], resolution: str) -> tuple[EngineRequest, np.ndarray]:
        width, height = RESOLUTIONS[resolution]
        geometry = self._model_config.geometry
        grid = geometry.grid(height, width)
        length = geometry.num_tokens(grid)
        spans = []
        for i, jpeg in enumerate(jpegs):
            source = ImageSource("jpeg", self._store(jpeg), height, width)
            spans.append(ImageSpan(f"{rid}-{i}".encode().ljust(32), 2 + i * (length + 2), length, grid, source))
        ids = np.full(len(jpegs) * (length + 2) + TEXT_TOKENS, TEXT_ID, dtype=np.int32)
        for span in spans:
            ids[span.start : span.start + span.length] = self._model_config.image_token_id
        params = SamplingParams(max_tokens=1, temperature=0.0)
        return EngineRequest(rid, self._store(ids.tobytes()), spans, params, Stages(), cache_salt=str(rid)), ids

    def _store(self, data: bytes) -> Region:
        offset = self._arena.alloc(len(data))
        self._arena.view(offset, len(data))[:] = data
        return Region(PROCESSOR_ARENA, offset, len(data))


def gaps_of(events: list[FunctionEvent]) -> tuple[float, float, list[tuple[float, str, str]]]:
    """Return (span, idle time, gaps as (length, kernel before, kernel after)) in milliseconds; kernels of all streams count as busy."""
    kernels = sorted((event for event in events if event.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    gaps, busy_until, last = [], kernels[0].time_range.end, kernels[0].name
    for kernel in kernels[1:]:
        if kernel.time_range.start > busy_until:
            gaps.append(((kernel.time_range.start - busy_until) / 1e3, last, kernel.name))
        if kernel.time_range.end > busy_until:
            busy_until, last = kernel.time_range.end, kernel.name
    span = (busy_until - kernels[0].time_range.start) / 1e3
    return span, sum(gap for gap, _, _ in gaps), sorted(gaps, reverse=True)


def main() -> None:
    """Entry point."""
    parser = make_parser("profile", __doc__, "json")
    parser.add_argument("--shape", default="8B", choices=list(SHAPES))
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--resolution", default="720p", choices=list(RESOLUTIONS))
    args = parser.parse_args()
    bench = Bench(args.shape)
    for rid in range(2):
        bench.prefill(rid, make_jpegs(rid, args.images, args.resolution, "noise"), args.resolution)
    jpegs = make_jpegs(2, args.images, args.resolution, "noise")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        bench.prefill(2, jpegs, args.resolution)
        torch.cuda.synchronize()
    span, idle, gaps = gaps_of(list(profiler.events()))
    print(f"{args.images} x {args.resolution}: {span:.1f} ms from the first kernel to the last, {idle:.2f} ms idle in {len(gaps)} gaps")
    longest = [[f"{gap:.3f}", before[:60], after[:60]] for gap, before, after in gaps[:10]]
    print(table(["gap, ms", "after", "before"], longest))
    if args.json:
        write_json(args.json, {"environment": environment(), "span_ms": span, "idle_ms": idle, "longest": longest})


if __name__ == "__main__":
    main()
