"""Assembly of a worker: model, weights, profile, memory, KV pool, graphs. This module selects the classes for the kind of device, so that a
step has no branches for it."""

import io
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from PIL import Image
from tqdm import tqdm

from engine.wire.adapters import AdapterRead, ReadAdapter
from engine.wire.arena import ArenaView
from engine.wire.child import Child
from engine.wire.config import GIB, MIB, EngineConfig
from engine.wire.ipc import Outbox
from engine.wire.memory import Plan, check_plan, decoder_format, max_hidden, max_samples, plan_host, plan_memory, sizes_for
from engine.wire.messages import MAX_PROPOSED, PROCESSOR_ARENA, Prefetch, WorkerReady
from engine.wire.step_sizes import StepSizes, step_sizes
from engine.wire.updates import Order
from engine.worker.adapters import WorkerAdapters
from engine.worker.graphs import StepGraphs
from engine.worker.head import make_head
from engine.worker.images import ImageCache
from engine.worker.jpeg import ImageReader
from engine.worker.profile import free_bytes, measure, run_once
from engine.worker.rows import Rows
from engine.worker.runner import Runner
from engine.worker.sampling.sampler import Sampler
from engine.worker.sampling.samples import BYTES_PER_SAMPLE
from engine.worker.staging import Staging
from engine.worker.updates import UpdateWorker
from engine.worker.warm_up import warm_up_steps
from models.cache.states import RowStates, Snapshots
from models.checkpoint.load import init_dummy_weights, load_cache_scales, load_eagle3, load_weights
from models.config.formats import Format, entry_of, final_format
from models.config.schemes import Scheme
from models.config.types import ModelConfig
from models.decoders.contract import LanguageModel, make_model
from models.kernels.backend import Backend
from models.kernels.jpeg import JpegDecoder
from models.kernels.make import make_backend
from models.kernels.ops import KVPool
from models.kernels.paged import allocate_pools
from models.kernels.sampling import SamplingOps
from models.parallel.group import TensorParallel
from models.parallel.symmetric import SymmetricSums, peers_are_mapped
from models.vision.shares import COSTS

logger = logging.getLogger(__name__)

INT64 = 8
Result = TypeVar("Result")
Handlers = dict[type, Callable[[Any], object]]
STAGED_PER_TOKEN = 9 * INT64  # id, three positions, slot, adapter; for a scored token also index, target, scored flag
WARM_UP_SIZE = (1280, 720)
WARM_UP_IMAGES = 8
STAGED_PER_SAMPLE = BYTES_PER_SAMPLE + 6 * INT64  # logits index and its position; per row its number and start; known ids


@dataclass(frozen=True, slots=True)
class Loaded:
    backend: Backend
    sizes: StepSizes
    tp: TensorParallel
    model: LanguageModel
    sampling: SamplingOps
    sampler: Sampler
    decoder: JpegDecoder
    tower_stream: torch.cuda.Stream | None  # None on a CPU
    adapters: WorkerAdapters | None


def build_runner(child: Child, model_config: ModelConfig, rank: int, device: torch.device) -> tuple[Runner, Handlers, WorkerReady]:
    """Return a runner that is ready for plans, handlers of all other messages, and the description for the scheduler. ValueError or OSError
    if the model cannot be loaded."""
    config, text, free = child.config, model_config.text, free_bytes(device)
    loaded = load(child, model_config, rank, device)
    backend, model, spec = loaded.backend, loaded.model, loaded.model.cache_spec
    sizes = loaded.sizes
    captured = None if config.enforce_eager or not backend.captures_graphs else sizes
    hidden_TX = None  # allocated before the weights are measured
    if text.has_head:
        hidden_TX = torch.zeros((max_hidden(config, sizes), text.head_input_size), dtype=model.dtype, device=device)
    memory = divide_memory(loaded, config, free)
    pools = allocate_pools(spec.paged, memory.num_blocks + 1, config.block_size, model.dtype, device)  # the last block is scratch
    attention = backend.attention(pools, text.num_heads // loaded.tp.size)
    max_blocks = -(-(child.runtime.max_model_len + MAX_PROPOSED) // config.block_size) + 1
    rows = make_rows(loaded, config, pools, hidden_TX, max_blocks)
    graphs = None if captured is None else make_graphs(model, backend, pools, rows, captured, config, max_blocks)
    if graphs is not None:
        with phase("capture of graphs"):
            before, num_graphs = free_bytes(device), graphs.capture()
        logger.info("%d graphs hold %.2f GiB", num_graphs, (before - free_bytes(device)) / GIB)
    arena = child.arena_view(PROCESSOR_ARENA)
    staged = staging_bytes(config, max_samples(config, sizes), max_blocks)
    images = make_images(loaded, arena)
    update = UpdateWorker(child, rank, model, images.forget_early).execute
    handlers: Handlers = {Prefetch: images.prefetch, Order: update}
    if loaded.adapters is not None:
        handlers[ReadAdapter] = loaded.adapters.read
    runner = Runner(
        model=model,
        attention=attention,
        rows=rows,
        sampler=loaded.sampler,
        images=images,
        staging=Staging(staged, device, backend.transfers),
        graphs=graphs,
        prompts=arena,
        tp=loaded.tp,
        head=make_head(model, attention, rows, staged, graphs) if text.has_head else None,
        adapters=loaded.adapters,
    )
    if device.type == "cuda":
        longest = min(child.runtime.max_model_len, config.max_num_batched_tokens)
        with phase("warm-up of steps"):
            warm_up_steps(runner, [size for size in sizes.mixed if size <= longest])
    ready = WorkerReady(
        rank=rank,
        num_blocks=memory.num_blocks,
        image_cache_bytes=memory.image_cache,
        bytes_per_image_token=model_config.num_visual_levels * text.hidden_size * model.dtype.itemsize,
        step_sizes=sizes,
        snapshot_blocks=spec.snapshot_blocks(config.block_size),
    )
    return runner, handlers, ready


def load(child: Child, model_config: ModelConfig, rank: int, device: torch.device) -> Loaded:
    """Join the other ranks and load weights, while kernels are compiled and the rest of the worker warms up."""
    config, text = child.config, model_config.text
    dtype, backend = pick_dtype(config, device), make_backend(child.runtime.backend, device)
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    sizes = sizes_for(model_config, step_sizes(backend.name, num_multiprocessors))
    compile = partial(backend.load, text.heads(config.tp), model_config.vision_head_dim)
    kernels = meanwhile(device, "compilation of kernels", compile)
    sampling = meanwhile(device, "warm-up of sampling", partial(make_sampler, child, model_config, backend, sizes, rank))
    decoder = backend.jpeg_decoder(config.processing_pool_size)
    warm = meanwhile(device, "warm-up of the image decoder", partial(warm_up, decoder))
    tp = join_ranks(child, rank, text.hidden_size, dtype, backend)
    tp.warm_up(config.max_num_batched_tokens, text.hidden_size, dtype, device)
    with phase("weights"):
        model = load_model(child, model_config, tp, backend, dtype)
    tower_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    kernels.result()
    warm.result()
    if tower_stream is not None:
        with phase("compilation of a step's kernels"):
            run_once(model, backend, config, tower_stream, sizes)
    adapters = make_adapters(child, model, backend, tower_stream)
    return Loaded(backend, sizes, tp, model, *sampling.result(), decoder, tower_stream, adapters)


def make_sampler(child: Child, model_config: ModelConfig, backend: Backend, sizes: StepSizes, rank: int) -> tuple[SamplingOps, Sampler]:
    config, num_samples = child.config, max_samples(child.config, sizes)
    ops = backend.sampling(num_samples, model_config.text.vocab_size)
    sampler = Sampler(ops, config.max_num_seqs, num_samples, model_config, Path(child.runtime.model_folder), backend.device)
    loading = sampler.rules.load_early() if backend.device.type == "cuda" and rank == 0 else None
    sampler.warm_up()
    if loading is not None:
        loading.result()  # takes seconds that would delay streams later
    return ops, sampler


def make_adapters(child: Child, model: LanguageModel, backend: Backend, stream: torch.cuda.Stream | None) -> WorkerAdapters | None:
    """Create slots for adapters and read --lora-modules to host memory. ValueError or OSError if one cannot be read."""
    config = child.config
    if not config.num_adapter_slots:
        return None
    num_slots, num_kept = config.num_adapter_slots, max(config.num_adapter_slots, len(child.runtime.adapters))
    report = Outbox[AdapterRead](child.run_dir, "scheduler").send
    adapters = WorkerAdapters(model, backend, num_slots, num_kept, config.max_lora_rank, stream, report)
    adapters.keep(child.runtime.adapters[:num_kept])
    return adapters


def make_rows(loaded: Loaded, config: EngineConfig, pools: list[KVPool], hidden_TX: torch.Tensor | None, max_blocks: int) -> Rows:
    model = loaded.model
    states = tuple(RowStates(group, config.max_num_seqs, model.device, config.max_drafts) for group in model.cache_spec.states)
    return Rows(
        max_num_seqs=config.max_num_seqs,
        max_blocks=max_blocks,
        block_size=config.block_size,
        geometry=model.config.geometry,
        device=model.device,
        max_top_k=loaded.sampling.max_top_k,
        states=states,
        snapshots=Snapshots(pools, states) if states else None,
        hidden_TX=hidden_TX,
        scratch_block=pools[0][0].shape[0] - 1,
        transfers=loaded.backend.transfers,
    )


def make_images(loaded: Loaded, arena: ArenaView) -> ImageCache:
    """The image cache. Ranks encode an image together only if the tower's heads can be split."""
    model, tp, vision = loaded.model, loaded.tp, loaded.model.config.vision
    costs = None if vision is None or vision.num_heads % tp.size else COSTS[loaded.backend.name]
    reader = ImageReader(arena, loaded.decoder, model.device)
    return ImageCache(model.tower, reader, tp, loaded.tower_stream, costs, loaded.adapters)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Log the time of a phase of the start."""
    started = time.monotonic()
    yield
    logger.info("%s: %.1f s", name, time.monotonic() - started)


def meanwhile(device: torch.device, name: str, run: Callable[[], Result]) -> Future[Result]:
    """Run a phase of the start in a thread. A failed start does not wait for it."""

    def timed() -> Result:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the current device is per thread
        with phase(f"{name}, meanwhile"):
            return run()

    return ThreadPoolExecutor(1, name).submit(timed)


def divide_memory(loaded: Loaded, config: EngineConfig, free: int) -> Plan:
    """Plan this rank's device, of which `free` bytes were free at the start. ValueError if the model does not fit."""
    model, stream, limit = loaded.model, loaded.tower_stream, math.inf
    if stream is None:
        plan = plan_host(config, model.cache_spec)
    else:
        with phase("measurement of memory"):
            limit, num_logits = min(free, config.gpu_memory or free), max_samples(config, loaded.sizes)
            used = measure(model, loaded.backend, loaded.sampling, config, num_logits, stream, free)
        plan = plan_memory(config, model.config, model.cache_spec, loaded.sizes, used, limit)
    check_plan(plan, limit)
    logger.info("memory in GiB: %s", ", ".join(map(" ".join, plan.in_gib.items())))
    return plan


def pick_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"auto": automatic, "bfloat16": torch.bfloat16, "float32": torch.float32}[config.dtype]


def join_ranks(child: Child, rank: int, width: int, dtype: torch.dtype, backend: Backend) -> TensorParallel:
    """Join all ranks: NCCL on GPUs, gloo on CPUs. Collectives of few tokens, `width` values each, use peer-mapped GPU memory if
    possible."""
    size, device = child.config.tp, backend.device
    if size == 1:
        return TensorParallel.single()
    collectives = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(collectives, init_method=f"file://{child.run_dir}/ranks", rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    tp = TensorParallel(rank, size, group, whole_experts=child.config.ep)
    if device.type != "cuda" or not child.config.symmetric_memory:
        return tp
    if not peers_are_mapped(size):
        logger.info("the GPUs cannot map each other's memory (no NVLink): NCCL also reduces small steps")
        return tp
    exchange = backend.exchange(group) if dtype == torch.bfloat16 else None
    return replace(tp, small_sums=SymmetricSums(group, width, dtype, device), exchange=exchange)


def load_model(child: Child, model_config: ModelConfig, tp: TensorParallel, backend: Backend, dtype: torch.dtype) -> LanguageModel:
    is_dummy = child.config.load_format == "dummy"
    format = decoder_format(child.config, model_config.text)
    cache: set[Format] = {"float8"} if model_config.text.has_float8_cache else set()
    check_formats(backend, cache | {format, *(final_format(rule.format) for rule in model_config.text.rules)}, dtype)
    text = replace(model_config.text, quantized_to=format)
    text = replace(text, format=format) if is_dummy else text
    model = make_model(replace(model_config, text=text), tp, backend, dtype)
    if is_dummy:
        init_dummy_weights(model, seed=0)
    else:
        load_weights(model, Path(child.runtime.model_folder), make_progress(tp.rank))
        load_cache_scales(model, Path(child.runtime.model_folder))
        if model.config.text.eagle3 is not None:
            load_eagle3(model, Path(child.runtime.draft_folder), make_progress(tp.rank))
    model.finish()
    if model.predictor is not None and backend.runs("float8"):
        model.predictor.round_output_matrix()
    return model


def check_formats(backend: Backend, formats: Iterable[Format], dtype: torch.dtype) -> None:
    """ValueError if the backend cannot multiply matrices of one of the formats."""
    for format in formats:
        if not backend.runs(format):
            raise ValueError(f"{format} needs a GPU of compute capability {'.'.join(map(str, entry_of(format).capability))} or newer")
        if format != "plain" and dtype == torch.float32 and backend.name != "torch":
            raise ValueError(f"{format} matrices are multiplied in bfloat16: --dtype float32 needs --backend torch")
        if Scheme.parse(format) is not None and backend.name != "torch" and find_spec("humming") is None:
            raise ValueError(f'{format} matrices on GPUs need the package humming-kernels: pip install -e ".[cuda]"')


def make_progress(rank: int) -> Callable[[int, int], None]:
    """Return a report of loaded and total bytes: a bar of rank 0 on a terminal, otherwise lines in the log."""
    bar = tqdm(desc="weights", unit="B", unit_scale=True, unit_divisor=1024, delay=1, disable=None if rank == 0 else True)
    reported = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal reported
        if not bar.disable:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()
        elif time.monotonic() - reported > 1.0:
            reported = time.monotonic()
            logger.info("loaded %.1f of %.1f GiB", done / GIB, total / GIB)

    return report


def make_graphs(
    model: LanguageModel, backend: Backend, pools: list[KVPool], rows: Rows, sizes: StepSizes, config: EngineConfig, max_blocks: int
) -> StepGraphs | None:
    num_heads, num_samples = model.config.text.num_heads // model.tp.size, max_samples(config, sizes)
    make_attention = backend.fixed_attention(
        pools, num_heads, num_samples + sizes.large_step, max_blocks, model.config.text.has_fusable_heads
    )
    if make_attention is None:
        return None
    return StepGraphs(
        model=model,
        make_attention=make_attention,
        rows=rows,
        sizes=sizes,
        max_samples=num_samples,
        has_adapters=config.num_adapter_slots > 0,
    )


def warm_up(decoder: JpegDecoder) -> None:
    """Warm up the decoder: its first batch may take seconds, which no request should wait for."""
    buffer = io.BytesIO()
    Image.effect_noise(WARM_UP_SIZE, 64).convert("RGB").save(buffer, "JPEG")
    decoder.decode([memoryview(buffer.getvalue())] * WARM_UP_IMAGES)


def staging_bytes(config: EngineConfig, num_samples: int, max_blocks: int) -> int:
    """Upper bound of a step's staged bytes: per token, per sample, and every row's int32 pages."""
    pages = 4 * config.max_num_seqs * max_blocks
    return STAGED_PER_TOKEN * config.max_num_batched_tokens + STAGED_PER_SAMPLE * num_samples + pages + MIB
