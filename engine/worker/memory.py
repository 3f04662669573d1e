"""How much of a device the KV pool may take: what is left of its share after all that is there and all that is still to come.

Called once at start by the worker. On a CPU the sizes are the configured ones. Host memory for embeddings is had here, too.

    free at the start  x  --gpu-memory-utilization  =
        held: weights, sampler, decoder of images, CUDA's own   +   peak of a step's activations   +   captured graphs
        +   tables and graphs of the vision tower   +   image cache   +   KV pool
"""

import logging
import mmap
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import GIB, MIB, EngineConfig
from engine.plan import fixed_kv_bytes, share_out
from models.attention.paged import allocate_pools
from models.backends.backend import Backend
from models.batch import AttentionLayout, ForwardBatch
from models.cache import CacheSpec
from models.contract import VisionLanguageModel
from models.sampling import DrawParams, SamplingOps

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 512 * MIB
CPU_IMAGE_CACHE_BYTES = 256 * MIB
DEFAULT_POOL = (0, 0)  # torch's memory that belongs to no graph


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that the worker allocates or promises."""

    num_blocks: int
    image_cache_bytes: int


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a GPU will have to hold beside the KV pool and the image cache; `free` is what it had before anything was there."""

    free: int
    held: int  # by now, as the driver counts
    activations: int  # of an encode and a step at once, at their peak
    step_graphs: int
    tower: int  # tables and graphs that are made when sizes come again, and an image that no plan has named yet
    states: int  # of rows, where layers have any

    @property
    def total(self) -> int:
        return self.held + self.activations + self.step_graphs + self.tower + self.states


def free_bytes(device: torch.device) -> int:
    """What the driver says is free on a GPU; 0 on a CPU, where nothing is planned."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


class StepMemory:
    """What a step may come to hold on a device, at most. A CPU's memory is not counted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept_bytes = 0
        self.note_graphs()

    def note_graphs(self) -> None:
        """After a capture: what graphs compute in stays theirs. It takes milliseconds."""
        if self._device.type == "cuda":
            self._kept_bytes = idle_bytes_of_graphs(torch.cuda.memory_snapshot(include_traces=False), self._device.index)

    def free_bytes(self) -> int:
        """What the driver has, and half of what torch has at hand: the other half may lie in pieces that are too small."""
        if self._device.type != "cuda":
            return sys.maxsize
        at_hand = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free_bytes(self._device) + (at_hand - self._kept_bytes) // 2


def idle_bytes_of_graphs(segments: Sequence[Mapping[str, Any]], device_index: int) -> int:
    """Of torch's `segments` those that lie in pools of graphs, without what tensors take of them."""
    mine = [segment for segment in segments if segment["device"] == device_index and segment["segment_pool_id"] != DEFAULT_POOL]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in mine)


def plan_memory(config: EngineConfig, spec: CacheSpec, needs: Needs | None) -> MemoryPlan:
    """`needs` of a GPU, None on a CPU. ValueError if no block fits."""
    block_bytes = config.block_size * spec.bytes_per_token
    image_bytes = config.image_cache_bytes or CPU_IMAGE_CACHE_BYTES
    kv_bytes = fixed_kv_bytes(config, block_bytes) or CPU_KV_BYTES
    most = image_bytes + kv_bytes
    if needs is not None:
        left = int(needs.free * config.gpu_memory_utilization) - needs.total
        most = needs.free - needs.total  # of what flags ask for
        image_bytes, kv_bytes = share_out(config, left, block_bytes)
        parts = (needs.free, needs.held, needs.activations, needs.step_graphs, needs.tower, needs.states, image_bytes, kv_bytes)
        text_of = "memory in GiB: %s free at the start; held %s, activations %s, graphs %s, tower %s, states %s, image cache %s, KV pool %s"
        logger.info(text_of, *(f"{size / GIB:.1f}" for size in parts))
    num_blocks = kv_bytes // block_bytes
    if num_blocks < 1 or image_bytes + kv_bytes > most:
        raise ValueError(
            "there is no memory for the KV pool, or not as much as was asked for: raise --gpu-memory-utilization, or lower "
            "--kv-cache-memory-bytes, --image-cache-bytes, --max-num-batched-tokens, --max-num-encoder-tokens or --max-num-seqs"
        )
    return MemoryPlan(num_blocks, image_bytes)


def allocate_host(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 host memory of exactly this size; pinned for a GPU, so that copies wait for nobody. OSError or ValueError if it cannot be had.

    Mapped and registered by hand: torch's allocator of pinned memory rounds up to a power of two, 20 GiB to 32. Pinned as long as the
    returned tensor lives: what is mapped at a place that is still registered could not be.
    """
    host = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    if device.type == "cuda":
        cudart = torch.cuda.cudart()
        if int(cudart.cudaHostRegister(host.data_ptr(), num_bytes, 0)) != 0:
            raise ValueError("host memory for image embeddings could not be pinned: lower --image-host-cache-bytes")
        weakref.finalize(host, cudart.cudaHostUnregister, host.data_ptr()).atexit = False
    return host


@torch.inference_mode()
def profile_peak(
    model: VisionLanguageModel, backend: Backend, sampling: SamplingOps, config: EngineConfig, tower_stream: torch.cuda.Stream
) -> int:
    """Bytes of activations at the peak: of an encoder budget of images, and of a full batch of tokens whose rows are all drawn by sorting
    beside it, since `tower_stream` may encode while another step runs."""
    device, model_config = model.device, model.config
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    unit = model_config.vision.patch_size * model_config.vision.merge_size
    side = int(config.max_num_encoder_tokens**0.5)
    tower_stream.wait_stream(torch.cuda.current_stream(device))  # made-up weights may still be on their way
    with torch.cuda.stream(tower_stream):
        image = torch.randint(256, (side * unit, side * unit, 3), dtype=torch.uint8, device=device)
        model.encode([image], [model_config.geometry.grid(side * unit, side * unit)])
    encode_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    num_tokens = config.max_num_batched_tokens
    num_blocks = -(-num_tokens // config.block_size)
    pools = allocate_pools(model.cache_spec, num_blocks, config.block_size, model.dtype, device)
    attention = backend.attention(pools, model_config.text.num_heads // model.tp.size)
    batch = _one_long_row(num_tokens, num_blocks, config.max_num_seqs, model.cache_spec, device)
    attention.plan(batch.attention)
    logits_SV = model.logits(model(batch, attention))
    sampling.draw(logits_SV, _sorted_draws(len(logits_SV), device))
    torch.cuda.synchronize(device)
    pool_bytes = sum(k.nbytes + v.nbytes for k, v in pools)
    return torch.cuda.max_memory_allocated(device) - before + encode_bytes - pool_bytes


def _sorted_draws(num_rows: int, device: torch.device) -> DrawParams:
    """Rows that each need their whole vocabulary in order."""
    ones, zeros = torch.ones(num_rows, device=device), torch.zeros(num_rows, dtype=torch.int32, device=device)
    wide = torch.arange(num_rows, device=device)
    return DrawParams(ones, 0.9 * ones, (0 * ones).log(), zeros, zeros, wide, largest_top_k=0, is_greedy=False)


def _one_long_row(num_tokens: int, num_blocks: int, num_logits: int, spec: CacheSpec, device: torch.device) -> ForwardBatch:
    positions = torch.arange(num_tokens, device=device)
    layout = AttentionLayout(
        qo_indptr_cpu=torch.tensor([0, num_tokens], dtype=torch.int32),
        kv_lens_cpu=torch.tensor([num_tokens], dtype=torch.int32),
        page_indptr_cpu=torch.tensor([0, num_blocks], dtype=torch.int32),
        pages=torch.arange(num_blocks, dtype=torch.int32, device=device),
        slot_mapping_T=positions,
        num_prefill_rows=1,
    )
    logits_indices = torch.arange(min(num_logits, num_tokens), device=device)
    states = tuple(torch.zeros((1, size), dtype=torch.uint8, device=device) for size in spec.state_bytes)
    return ForwardBatch(torch.zeros_like(positions), positions.expand(3, -1), layout, (), logits_indices, positions[:1], states)
