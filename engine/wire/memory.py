"""Division of a GPU's memory: for `--plan`, the launcher's cuts on small cards, and a worker's pools.

    memory  x  --gpu-memory-utilization  =
        weights + runtime + activations + step graphs + tower + states of rows   +   image cache + KV pool

`plan_memory` divides what a worker has measured (`engine/worker/profile.py`), or what `estimate` computes without one.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.wire.config import GIB, HEAD_GRAPH_TOKENS, MAX_HEAD_DRAFTS, MIB, EngineConfig
from engine.wire.messages import MAX_EARLY_TOKENS
from engine.wire.step_sizes import PORTABLE, StepSizes
from models.cache.spec import SPARE_ROWS, CacheSpec
from models.config.formats import Format, entry_of, final_format
from models.config.huggingface import read_config
from models.config.types import ModelConfig, TextConfig
from models.lora.targets import TOWER, slot_bytes, targets

VALUE_BYTES = 2  # bfloat16
GRAPH_BYTES = 4 * MIB  # launches of one captured step
WORKSPACE_BYTES = 32 * MIB  # cuBLAS's, per stream
RUNTIME_BYTES, RANKS_BYTES = 7 * GIB // 10, 8 * GIB // 10  # CUDA, kernels, sampler; memory shared by ranks
TOWER_BYTES = 9 * MIB // 10  # tables and graphs, per value of the tower's width
PATCH_VALUES = 9.4  # of a patch in the tower at once, per value of its width: pixels, stream, norm, and an MLP or attention
LOGITS_BYTES = 24  # per row and vocabulary entry while rows sample by sorting
GPU_IMAGE_CACHE_BYTES = 4 * GIB
CPU_IMAGE_CACHE_BYTES, CPU_KV_BYTES = 256 * MIB, 512 * MIB
DECODER_BYTES_PER_PIXEL = 6  # of a JPEG that the GPU decodes: its pixels, and the decoder's buffers
GATHER_COPIES = 4  # copies of embeddings that ranks exchange: own padded, all padded and ordered, the cache's
IMAGE_CACHE_SHARE = 4  # on a small GPU: a fourth of image cache and KV pool
ENOUGH_TOKENS, ENOUGH_SNAPSHOTS = 8192, 8  # minimum KV pool; below it, steps become smaller
SMALLEST = {"max_num_batched_tokens": 1024, "max_num_encoder_tokens": 4096, "max_num_seqs": 16}  # of steps that are made smaller
CARDS = (8, 12, 16, 24, 32, 48, 80, 141)  # GiB


class Used(NamedTuple):
    """Bytes on a GPU that a worker measures: `encode` and `step` are the peaks of an encode, and of a step or its sampling, which run
    concurrently with it."""

    weights: int
    runtime: int
    encode: int
    step: int
    tower: int  # tables and graphs


class Plan(NamedTuple):
    """Bytes of each part by its name in the table, and the blocks of the KV pool. `spare` is negative by the lacking bytes."""

    parts: dict[str, int]
    num_blocks: int
    spare: int

    @property
    def image_cache(self) -> int:
        return self.parts["image cache"]

    @property
    def in_gib(self) -> dict[str, str]:
        return {name: f"{size / GIB:.1f}" for name, size in self.parts.items()}


def num_values(model: ModelConfig, of_tower: bool) -> int:
    """Count values in matrices of the tower, or of the decoder without its experts, routers and embeddings."""
    return sum(math.prod(shape) for path, shape in targets(model).items() if path.startswith(TOWER) == of_tower)


def layer_parameters(model: ModelConfig) -> int:
    """Mean parameters of a layer's matrices without routers."""
    text, moe = model.text, model.text.moe
    inner = 0 if moe is None else (moe.num_experts + moe.has_shared) * moe.intermediate_size
    return num_values(model, of_tower=False) // text.num_layers + 3 * text.hidden_size * inner


def decoder_format(config: EngineConfig, text: TextConfig) -> Format:
    return "float8" if config.quantization == "fp8" and text.format == "plain" else final_format(text.format)


def read_model(config: EngineConfig, folder: Path, draft_folder: str) -> ModelConfig:
    """Return the model with the configured head and cache. ValueError or OSError."""
    model = read_config(folder, config.draft == "mtp", draft_folder)
    delta = model.text.delta and replace(model.text.delta, has_bfloat16_state=config.mamba_ssm_dtype == "bfloat16")
    return replace(model, text=replace(model.text, delta=delta, has_float8_cache=config.kv_cache_dtype.startswith("fp8")))


def weight_bytes(model: ModelConfig, tp: int, format: Format) -> int:
    """Estimate the bytes of weights on each of `tp` GPUs: the large matrices, and the head of --draft with its output matrix in float8."""
    text, head, whole = model.text, model.text.eagle3, num_values(model, of_tower=True)
    table, layer = text.vocab_size * text.hidden_size, layer_parameters(model)
    split = (text.num_layers + bool(text.head_path)) * layer * entry_of(format).value_bytes
    split += (1 if model.tie_word_embeddings else 2) * table * VALUE_BYTES + (table if text.head_path else 0)
    if head is not None:
        width, inner = head.layer.hidden_size, head.layer.num_heads * head.layer.head_dim + head.layer.intermediate_size
        split += 3 * (VALUE_BYTES * inner + head.layer.vocab_size) * width
        whole += len(head.taps) * width**2
    return int(split / tp) + VALUE_BYTES * whole


def estimate(model: ModelConfig, config: EngineConfig) -> Used:
    """Estimate the memory of a model that is not loaded, by formulas fitted to measurements."""
    text, vision, encode, tower = model.text, model.vision, 0, 0
    if vision is not None:
        of_token = PATCH_VALUES * vision.hidden_size * vision.merge_size**2 + model.num_visual_levels * vision.out_hidden_size
        encode, tower = WORKSPACE_BYTES + int(VALUE_BYTES * of_token * config.max_num_encoder_tokens), TOWER_BYTES * vision.hidden_size
    inner = 3 * text.intermediate_size // config.tp
    if text.moe is not None:
        inner = (text.moe.num_experts_per_tok + text.moe.has_shared) * (text.moe.intermediate_size // config.tp + text.hidden_size)
    step = VALUE_BYTES * (inner + 3 * text.hidden_size) * config.max_num_batched_tokens
    hidden = VALUE_BYTES * text.head_input_size * max_hidden(config, PORTABLE) if text.has_head else 0
    samples = LOGITS_BYTES * max_samples(config, PORTABLE) * text.vocab_size
    adapters = config.num_adapter_slots * slot_bytes(model, config.tp, config.max_lora_rank, VALUE_BYTES)
    return Used(
        weights=weight_bytes(model, config.tp, decoder_format(config, text)) + adapters,
        runtime=RUNTIME_BYTES + (RANKS_BYTES if config.tp > 1 else 0),
        encode=max(encode, gather_bytes(model, config)),
        step=WORKSPACE_BYTES + hidden + max(step, samples),
        tower=tower,
    )


def gather_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Peak bytes of the exchange of a step's embeddings by several ranks."""
    of_token = model.num_visual_levels * model.text.hidden_size * VALUE_BYTES
    return 0 if config.tp == 1 or model.vision is None else GATHER_COPIES * config.max_num_encoder_tokens * of_token


def max_samples(config: EngineConfig, sizes: StepSizes) -> int:
    return max(config.max_num_seqs, sizes.verify_rows if config.max_drafts else 0)


def max_hidden(config: EngineConfig, sizes: StepSizes) -> int:
    """Padded tokens of a step that the model's head reads."""
    return max(config.max_num_batched_tokens, max_samples(config, sizes) + sizes.large_step)


def sizes_for(model: ModelConfig, sizes: StepSizes) -> StepSizes:
    return sizes if model.text.moe is None else msgspec.structs.replace(sizes, usual=sizes.usual_sparse)


def step_graph_bytes(model: ModelConfig, sizes: StepSizes, config: EngineConfig, step: int) -> int:
    """Bytes of launches, shared logits, and the largest activations; `step`: those of `max_num_batched_tokens`."""
    if config.enforce_eager or not sizes.decodes:
        return 0
    decodes = sizes.graph_sizes(max_samples(config, sizes))
    num_graphs = len(decodes) * (1 + (config.num_adapter_slots > 0))
    num_graphs += MAX_HEAD_DRAFTS * sum(size <= HEAD_GRAPH_TOKENS for size in decodes) * model.text.has_head
    logits = 2 * 4 * decodes[-1] * model.text.vocab_size  # shared, and of the largest
    tensors = WORKSPACE_BYTES + max(0, step - WORKSPACE_BYTES) * decodes[-1] // config.max_num_batched_tokens
    return num_graphs * GRAPH_BYTES + logits + tensors


def plan_memory(config: EngineConfig, model: ModelConfig, spec: CacheSpec, sizes: StepSizes, used: Used, free: int) -> Plan:
    """Divide `free` bytes of a GPU, which has the efficient `sizes`."""
    early = 0 if model.vision is None else MAX_EARLY_TOKENS * model.num_visual_levels * model.text.hidden_size * VALUE_BYTES
    parts = {
        "weights": used.weights,
        "runtime": used.runtime,
        "activations": used.encode + used.step,
        "step graphs": step_graph_bytes(model, sizes, config, used.step),
        "tower": used.tower + early,
        "states": (config.max_num_seqs + 1 + SPARE_ROWS) * spec.row_bytes(config.max_drafts),
    }
    decoder = DECODER_BYTES_PER_PIXEL * config.max_image_pixels if model.vision else 0  # of the memory that is not planned
    left = min(int(free * config.gpu_memory_utilization), free - decoder) - sum(parts.values())
    usual = min(GPU_IMAGE_CACHE_BYTES, left // IMAGE_CACHE_SHARE) if model.vision else 0
    image_cache = config.image_cache_bytes or max(0, usual)
    kv_pool = left - image_cache if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
    num_blocks = max(0, kv_pool) // spec.block_bytes(config.block_size)
    spare = min(kv_pool, left - image_cache - kv_pool)
    return Plan(parts | {"image cache": image_cache, "KV pool": kv_pool}, num_blocks, spare)


def plan_host(config: EngineConfig, spec: CacheSpec) -> Plan:
    """Return the plan of a worker on a CPU, where nothing is measured."""
    parts = {"image cache": config.image_cache_bytes or CPU_IMAGE_CACHE_BYTES, "KV pool": config.kv_cache_memory_bytes or CPU_KV_BYTES}
    return Plan(parts, parts["KV pool"] // spec.block_bytes(config.block_size), 0)


def check_plan(plan: Plan, free: float) -> None:
    """ValueError if no block fits. Caches of a given size may exceed --gpu-memory-utilization."""
    if plan.num_blocks < 1 or sum(plan.parts.values()) > free:
        flags = "--gpu-memory-utilization, --kv-cache-memory-bytes, --max-num-batched-tokens, --max-num-encoder-tokens or --max-num-seqs"
        raise ValueError(f"a KV pool of {plan.parts['KV pool'] / GIB:.2f} GiB does not fit, or has no block: change {flags}")


def make_plan(config: EngineConfig, model: ModelConfig, gpu_memory: int) -> Plan:
    """Plan a GPU for a model that is not loaded. Kernels are those of `portable`; those of `hopper` have more graphs, of up to 0.5 GiB."""
    spec, sizes = model.text.cache_spec(config.tp, VALUE_BYTES), sizes_for(model, PORTABLE)
    return plan_memory(config, model, spec, sizes, estimate(model, config), gpu_memory)


def fit(config: EngineConfig, model: ModelConfig, gpu_memory: int) -> EngineConfig:
    """Halve the sizes of steps that have their defaults until the KV pool fits, or all are SMALLEST."""
    free = [name for name in SMALLEST if getattr(config, name) == getattr(EngineConfig(), name)]
    snapshots = ENOUGH_SNAPSHOTS * model.text.cache_spec(config.tp, VALUE_BYTES).snapshot_blocks(config.block_size)
    enough = 0 if config.kv_cache_memory_bytes is not None else snapshots + ENOUGH_TOKENS // config.block_size
    while (plan := make_plan(config, model, gpu_memory)).spare < 0 or plan.num_blocks < enough:
        smaller = {name: max(SMALLEST[name], getattr(config, name) // 2) for name in free}
        if all(getattr(config, name) == size for name, size in smaller.items()):
            return config
        config = msgspec.structs.replace(config, **smaller)
    return config


def cuts(asked: EngineConfig, fitted: EngineConfig) -> str:
    changed = (name for name in SMALLEST if getattr(asked, name) != getattr(fitted, name))
    return ", ".join(f"--{name.replace('_', '-')} {getattr(fitted, name)}" for name in changed)


def describe(config: EngineConfig, model: ModelConfig, name: str) -> str:
    """Return the table of `--plan`: a line for --gpu-memory, or for usual cards."""
    lines = []
    for memory in (config.gpu_memory,) if config.gpu_memory else tuple(size * GIB for size in CARDS):
        fitted = fit(config, model, memory)
        plan = make_plan(fitted, model, memory)
        line = {"GPU": f"{memory / GIB:.0f}", **plan.in_gib, "context": "does not fit", "smaller steps": ""}
        if plan.num_blocks and plan.spare >= 0:
            line["context"] = f"{min(plan.num_blocks * config.block_size, model.text.max_position_embeddings):,}"
            line["smaller steps"] = cuts(config, fitted)
        lines.append("  ".join(cell.rjust(len(column)) for column, cell in line.items()))
    kind = "bfloat16" if (format := decoder_format(config, model.text)) == "plain" else format
    title = f"{name}, decoder in {kind}, --tp {config.tp}; sizes in GiB on each GPU, context in tokens"
    return "\n".join([title, "  ".join(line), *lines])
