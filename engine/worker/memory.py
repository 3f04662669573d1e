"""How much of a device the KV pool may take: what is left of its share after weights, the image cache and the peak of a forward pass.

Called once at start by the worker. On a CPU the sizes are the configured ones. Host memory for embeddings is had here, too.
"""

import logging
import mmap
from dataclasses import dataclass

import torch

from engine.config import GIB, MIB, EngineConfig
from models.attention.paged import allocate_pools
from models.backends.backend import Backend
from models.batch import AttentionLayout, ForwardBatch
from models.cache import CacheSpec
from models.contract import VisionLanguageModel

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 512 * MIB
CPU_IMAGE_CACHE_BYTES = 256 * MIB
GPU_IMAGE_CACHE_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that the worker allocates or promises."""

    num_blocks: int
    image_cache_bytes: int


def plan_memory(config: EngineConfig, spec: CacheSpec, device: torch.device, peak_bytes: int) -> MemoryPlan:
    """`peak_bytes` is what a profiling pass held at its peak, weights included. ValueError if no block fits."""
    block_bytes = config.block_size * spec.bytes_per_token
    on_gpu = device.type == "cuda"
    image_bytes = config.image_cache_bytes or (GPU_IMAGE_CACHE_BYTES if on_gpu else CPU_IMAGE_CACHE_BYTES)
    kv_bytes = config.kv_cache_memory_bytes or CPU_KV_BYTES
    if on_gpu and config.kv_cache_memory_bytes is None:
        total = torch.cuda.get_device_properties(device).total_memory
        state_bytes = (config.max_num_seqs + 1) * sum(spec.state_bytes)
        kv_bytes = int(total * config.gpu_memory_utilization) - peak_bytes - image_bytes - state_bytes
        sizes = [f"{size / GIB:.1f}" for size in (total, peak_bytes, image_bytes, kv_bytes)]
        logger.info("memory in GiB: %s in all, %s weights and peak, %s image cache, %s KV pool", *sizes)
    num_blocks = config.num_gpu_blocks_override or kv_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError("no memory is left for the KV pool: raise --gpu-memory-utilization or lower --image-cache-bytes")
    return MemoryPlan(num_blocks, image_bytes)


def allocate_host(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 host memory of exactly this size; pinned for a GPU, so that copies wait for nobody. OSError or ValueError if it cannot be had.

    Mapped and registered by hand: torch's allocator of pinned memory rounds up to a power of two, 20 GiB to 32.
    """
    host = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    if device.type == "cuda" and int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), num_bytes, 0)) != 0:
        raise ValueError("host memory for image embeddings could not be pinned: lower --image-host-cache-bytes")
    return host


@torch.inference_mode()
def profile_peak(
    model: VisionLanguageModel,
    backend: Backend,
    config: EngineConfig,
    tower_stream: torch.cuda.Stream | None,
) -> int:
    """Bytes that the device holds at the peak: weights, an encoder budget of images, and a full batch of tokens beside it, since
    `tower_stream` may encode while another step runs."""
    device, model_config = model.device, model.config
    if device.type != "cuda":
        return 0
    weight_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    unit = model_config.vision.patch_size * model_config.vision.merge_size
    side = int(config.max_num_encoder_tokens**0.5)
    assert tower_stream is not None
    tower_stream.wait_stream(torch.cuda.current_stream(device))  # made-up weights may still be on their way
    with torch.cuda.stream(tower_stream):
        image = torch.randint(256, (side * unit, side * unit, 3), dtype=torch.uint8, device=device)
        model.encode([image], [model_config.geometry.grid(side * unit, side * unit)])
    encode_bytes = torch.cuda.max_memory_allocated(device) - weight_bytes
    torch.cuda.reset_peak_memory_stats(device)
    num_tokens = config.max_num_batched_tokens
    num_blocks = -(-num_tokens // config.block_size)
    pools = allocate_pools(model.cache_spec, num_blocks, config.block_size, model.dtype, device)
    attention = backend.attention(pools, model_config.text.num_heads // model.tp.size)
    batch = _one_long_row(num_tokens, num_blocks, config.max_num_seqs, model.cache_spec, device)
    attention.plan(batch.attention)
    model.logits(model(batch, attention))
    torch.cuda.synchronize(device)
    pool_bytes = sum(k.nbytes + v.nbytes for k, v in pools)
    return torch.cuda.max_memory_allocated(device) + encode_bytes - pool_bytes


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
