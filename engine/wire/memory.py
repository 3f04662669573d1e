"""Division of a GPU's memory: for `--plan`, the launcher's cuts on small cards, and a worker's pools.

    memory  x  --gpu-memory-utilization  =
        weights + runtime + activations + step graphs + tower + states of rows   +   image cache + KV pool

A worker measures the first six (`engine/worker/profile.py`); formulas fitted to measurements estimate them for others.
"""

import logging
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.wire.config import GIB, MIB, EngineConfig
from engine.wire.messages import MAX_EARLY_TOKENS
from models.cache.spec import SPARE_ROWS, CacheSpec
from models.config.formats import Format, entry_of, final_format
from models.config.huggingface import read_config
from models.config.schemes import Scheme
from models.config.types import Eagle3Config, ModelConfig, TextConfig, VisionConfig
from models.kernels.hopper.tuned import STEP_SIZES as HOPPER_SIZES
from models.kernels.reference.tuned import STEP_SIZES as TORCH_SIZES
from models.kernels.step_sizes import StepSizes
from models.kernels.triton.tuned import STEP_SIZES as PORTABLE_SIZES
from models.lora.targets import TOWER, slot_bytes, targets

logger = logging.getLogger(__name__)

STEP_SIZES = {"hopper": HOPPER_SIZES, "portable": PORTABLE_SIZES, "torch": TORCH_SIZES}
VALUE_BYTES = 2  # bfloat16
GRAPH_BYTES = 4 * MIB  # launches of one captured step
WORKSPACE_BYTES = 32 * MIB  # cuBLAS's, per stream
RUNTIME_BYTES, RANKS_BYTES = 7 * GIB // 10, 8 * GIB // 10  # CUDA, kernels, sampler; memory shared by ranks
TOWER_BYTES = 9 * MIB // 10  # tables and graphs, per value of the tower's width
LOGITS_BYTES = 24  # per row and vocabulary entry while rows sample by sorting
GPU_IMAGE_CACHE_BYTES = 4 * GIB
CPU_IMAGE_CACHE_BYTES, CPU_KV_BYTES = 256 * MIB, 512 * MIB
DECODER_BYTES_PER_PIXEL = 6  # of a JPEG that the GPU decodes: its pixels, and the decoder's buffers
GATHER_COPIES = 4  # copies of embeddings that ranks exchange: own padded, all padded and ordered, the cache's
LARGEST_IMAGE_BYTES = 512 * MIB  # embeddings of 16,384 tokens of 8B
IMAGE_CACHE_SHARE = 4  # on a small GPU: a fourth of image cache and KV pool
ENOUGH_TOKENS, ENOUGH_SNAPSHOTS = 8192, 8  # minimum KV pool; below it, steps become smaller
SMALLEST = {"max_num_batched_tokens": 1024, "max_num_encoder_tokens": 4096, "max_num_seqs": 16}
CARDS = (8, 12, 16, 24, 32, 48, 80, 141)  # GiB


class Needs(NamedTuple):
    """Bytes on each GPU in addition to the image cache and the KV pool."""

    weights: int = 0
    runtime: int = 0
    activations: int = 0
    step_graphs: int = 0
    tower: int = 0  # tables, graphs, and one image that was encoded early
    states: int = 0  # of rows


class Plan(NamedTuple):
    """Division of memory. `kv_pool` is negative by the lacking bytes or, if a flag fixes it, `spare`."""

    needs: Needs
    image_cache: int
    kv_pool: int
    block_bytes: int
    spare: int

    @property
    def num_blocks(self) -> int:
        return max(0, self.kv_pool) // self.block_bytes

    @property
    def parts(self) -> dict[str, str]:
        """Return GiB by the names of the table."""
        parts = {**self.needs._asdict(), "image_cache": self.image_cache, "KV_pool": self.kv_pool}
        return {name.replace("_", " "): f"{size / GIB:.1f}" for name, size in parts.items()}


def num_values(model: ModelConfig, of_tower: bool) -> int:
    """Count values in matrices of the tower, or of the decoder without its experts, routers and embeddings."""
    return sum(math.prod(shape) for path, shape in targets(model).items() if path.startswith(TOWER) == of_tower)


def layer_parameters(model: ModelConfig, num_experts: int | None = None) -> int:
    """Mean parameters of a layer's matrices without routers, with the experts of a token, or `num_experts`."""
    text, moe = model.text, model.text.moe
    inner = 0 if moe is None else ((num_experts or moe.num_experts_per_tok) + moe.has_shared) * moe.intermediate_size
    return num_values(model, of_tower=False) // text.num_layers + 3 * text.hidden_size * inner


def decoder_format(config: EngineConfig, text: TextConfig) -> Format:
    return "float8" if config.quantization == "fp8" and text.format == "plain" else final_format(text.format)


def weight_bytes(model: ModelConfig, tp: int, format: Format) -> int:
    """Bytes of weights on each of `tp` GPUs, without norms and biases."""
    text, vision = model.text, model.vision
    table = text.vocab_size * text.hidden_size
    stored = layer_parameters(model, None if text.moe is None else text.moe.num_experts)
    decoder = (text.num_layers + bool(text.head_path)) * stored * entry_of(format).value_bytes / tp
    embeddings = (1 if model.tie_word_embeddings else 2) * table * VALUE_BYTES / tp
    routers = 0 if text.moe is None else text.num_layers * text.hidden_size * text.moe.num_experts * VALUE_BYTES
    head = 2 * text.hidden_size**2 * VALUE_BYTES + table * entry_of("float8").value_bytes / tp if text.head_path else 0
    head += 0 if text.eagle3 is None else eagle3_bytes(text.eagle3, tp)
    inputs = 0 if vision is None else (patch_values(vision) + vision.num_position_embeddings) * vision.hidden_size
    return int(decoder + embeddings + routers + head + VALUE_BYTES * (num_values(model, of_tower=True) + inputs))


def eagle3_bytes(head: Eagle3Config, tp: int) -> int:
    """Bytes of the head's weights: `fc` is whole on each GPU, and the output matrix may also be stored in float8."""
    text = head.layer
    width, inner = text.hidden_size, text.num_heads * text.head_dim
    layer = width * (3 * inner + 4 * text.num_kv_heads * text.head_dim + 3 * text.intermediate_size)
    outputs = text.vocab_size * width * (VALUE_BYTES + entry_of("float8").value_bytes)
    return int(VALUE_BYTES * (len(head.taps) * width**2 + layer / tp) + outputs / tp)


def patch_values(vision: VisionConfig) -> int:
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2


class Activations(NamedTuple):
    """Peak bytes of an encode, and of a step or its sampling, which run concurrently with it."""

    encode: int
    step: int

    @classmethod
    def estimate(cls, model: ModelConfig, config: EngineConfig, sizes: StepSizes) -> "Activations":
        text, vision = model.text, model.vision
        encode = 0 if vision is None else encode_bytes(vision, config.max_num_encoder_tokens, model.num_visual_levels) + WORKSPACE_BYTES
        encode = max(encode, gather_bytes(model, config))
        step = step_bytes(model, config.tp, config.max_num_batched_tokens)
        step += dequantized_bytes(text, config.tp, decoder_format(config, text))
        hidden = VALUE_BYTES * text.head_input_size * max_hidden(config, sizes) if text.has_head else 0
        return cls(encode, WORKSPACE_BYTES + hidden + max(step, LOGITS_BYTES * max_samples(config, sizes) * text.vocab_size))


def encode_bytes(vision: VisionConfig, num_tokens: int, num_levels: int) -> int:
    """Peak bytes: patches and the bytes that they are made of, position embeddings, the stream and its norm; of a block, keys, values,
    queries and the attention's result, or the MLP's inner values; the result."""
    of_patch = patch_values(vision) * 3 // 2 + 3 * vision.hidden_size + 2 * vision.head_dim * 2  # rotary rows in float32, twice
    of_patch += max(4 * vision.hidden_size, vision.intermediate_size)
    of_token = of_patch * vision.merge_size**2 + num_levels * vision.out_hidden_size
    return VALUE_BYTES * num_tokens * of_token


def gather_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Peak bytes of the exchange of a step's embeddings by several ranks."""
    of_token = model.num_visual_levels * model.text.hidden_size * VALUE_BYTES
    return 0 if config.tp == 1 or model.vision is None else GATHER_COPIES * config.max_num_encoder_tokens * of_token


def dequantized_bytes(text: TextConfig, tp: int, format: Format) -> int:
    """Bytes of the largest matrix that a long step dequantizes: gates and up projections of an MLP or of all experts with a scheme of
    floats, which humming-kernels does not multiply."""
    if (scheme := Scheme.parse(format)) is None or scheme.element.startswith("int"):
        return 0
    inner = text.intermediate_size if text.moe is None else text.moe.num_experts * text.moe.intermediate_size
    return VALUE_BYTES * 2 * inner * text.hidden_size // tp


def read_model(config: EngineConfig, folder: Path, draft_folder: str) -> ModelConfig:
    """Return the model with the configured head and cache. ValueError or OSError."""
    model = read_config(folder, config.draft == "mtp", draft_folder)
    return replace(model, text=replace(model.text, has_float8_cache=config.kv_cache_dtype.startswith("fp8")))


def step_bytes(model: ModelConfig, tp: int, num_tokens: int) -> int:
    text = model.text
    of_token = 3 * text.intermediate_size // tp
    if text.moe is not None:
        of_token = (text.moe.num_experts_per_tok + text.moe.has_shared) * (text.moe.intermediate_size // tp + text.hidden_size)
    if text.delta is not None:
        delta = text.delta  # inputs before and after the convolution, changes and outputs of chunks of 64
        of_token = max(of_token, (2 * delta.conv_width + delta.num_value_heads * (5 * delta.value_dim + 64)) // tp)
    if text.has_float8_cache:  # keys and values before they are rounded
        of_token += 2 * text.heads(tp).num_kv * text.head_dim
    return VALUE_BYTES * (of_token + 3 * text.hidden_size) * num_tokens


def state_bytes(config: EngineConfig, spec: CacheSpec) -> int:
    return (config.max_num_seqs + 1 + SPARE_ROWS) * spec.row_bytes(config.proposals.max_tokens)


def max_samples(config: EngineConfig, sizes: StepSizes) -> int:
    return max(config.max_num_seqs, sizes.verify_rows if config.proposals.max_tokens else 0)


def max_hidden(config: EngineConfig, sizes: StepSizes) -> int:
    """Padded tokens of a step that the model's head reads."""
    return config.max_num_batched_tokens + 2 * max_samples(config, sizes) + sizes.large_step


def sizes_for(config: EngineConfig, model: ModelConfig, spec: CacheSpec, sizes: StepSizes) -> StepSizes:
    text = model.text
    if config.enforce_eager:
        sizes = msgspec.structs.replace(sizes, largest_chunk=0)
    return sizes.for_layers(
        num_parameters=layer_parameters(model) // config.tp,
        max_tokens=config.max_num_batched_tokens,
        is_sparse=text.moe is not None,
        is_float8=decoder_format(config, text) == "float8",
        has_states=text.delta is not None,
        token_bytes=spec.paged.bytes_per_token,
    )


def step_graph_bytes(model: ModelConfig, sizes: StepSizes, config: EngineConfig, step: int) -> int:
    """Bytes of launches, shared inputs and logits, and the largest activations; `step`: those of `max_num_batched_tokens`."""
    if config.enforce_eager or not sizes.decodes:
        return 0
    chunks, decodes = sizes.chunks_by_rows(config.max_num_seqs), sizes.up_to(sizes.decodes, max_samples(config, sizes))
    num_graphs = (len(decodes) + sum(map(len, chunks.values()))) * (1 + (config.num_adapter_slots > 0))
    largest_chunk = max((each[-1] for each in chunks.values()), default=0)
    tokens = max((rows + each[-1] for rows, each in chunks.items()), default=0)
    logits = 2 * 4 * (max([*chunks, decodes[-1]]) + sizes.large_step) * model.text.vocab_size  # shared, and of the largest
    embeddings = model.num_visual_levels * largest_chunk * model.text.hidden_size * VALUE_BYTES
    fixed = WORKSPACE_BYTES + dequantized_bytes(model.text, config.tp, decoder_format(config, model.text))
    return num_graphs * GRAPH_BYTES + logits + embeddings + fixed + max(0, step - fixed) * tokens // config.max_num_batched_tokens


def early_image_bytes(model: ModelConfig, config: EngineConfig) -> int:
    return min(MAX_EARLY_TOKENS, config.max_num_encoder_tokens) * model.num_visual_levels * model.text.hidden_size * VALUE_BYTES


def divide(config: EngineConfig, spec: CacheSpec, needs: Needs, free: int) -> Plan:
    """Divide what `needs` leaves of the `free` bytes; if a flag fixes the image cache or the KV pool, the other gets the rest."""
    decoder = DECODER_BYTES_PER_PIXEL * config.max_image_pixels if needs.tower else 0  # from the memory that is not planned, if it suffices
    left = min(int(free * config.gpu_memory_utilization), free - decoder) - sum(needs)
    block_bytes = spec.block_bytes(config.block_size)
    fixed = config.kv_cache_memory_bytes
    rest = left // IMAGE_CACHE_SHARE if fixed is None else max(left - fixed, min(left // IMAGE_CACHE_SHARE, LARGEST_IMAGE_BYTES))
    image_cache = config.image_cache_bytes or max(0, min(GPU_IMAGE_CACHE_BYTES, rest if needs.tower else 0))
    kv_pool = left - image_cache if fixed is None else fixed
    return Plan(needs, image_cache, kv_pool, block_bytes, left - image_cache - kv_pool)


def plan_memory(config: EngineConfig, spec: CacheSpec, needs: Needs | None, free: int) -> Plan:
    """Plan a worker's memory. `needs`: None on a CPU. ValueError if no block fits."""
    block_bytes = spec.block_bytes(config.block_size)
    fixed = config.kv_cache_memory_bytes
    if needs is None:
        image_cache, needs, free = config.image_cache_bytes or CPU_IMAGE_CACHE_BYTES, Needs(), sys.maxsize
        plan = Plan(needs, image_cache, fixed or CPU_KV_BYTES, block_bytes, 0)
    else:
        free = min(free, config.gpu_memory or free)
        plan = divide(config, spec, needs, free)
        logger.info("memory in GiB: %.1f free at startup; %s", free / GIB, ", ".join(map(" ".join, plan.parts.items())))
    if 0 < plan.kv_pool < block_bytes and (fixed or free == sys.maxsize):
        raise ValueError(f"a KV pool of {plan.kv_pool:,} bytes holds no block of {block_bytes:,}: raise --kv-cache-memory-bytes")
    if plan.num_blocks < 1 or plan.image_cache + plan.kv_pool > free - sum(needs):  # may exceed --gpu-memory-utilization only
        flags = "--kv-cache-memory-bytes, --image-cache-bytes, --max-num-batched-tokens, --max-num-encoder-tokens or --max-num-seqs"
        raise ValueError(f"there is no memory for the KV pool: raise --gpu-memory-utilization, or lower {flags}")
    return plan


def make_plan(config: EngineConfig, model: ModelConfig, gpu_memory: int, backend: str) -> Plan:
    text, vision, tp = model.text, model.vision, config.tp
    spec = text.cache_spec(tp, VALUE_BYTES)
    sizes = sizes_for(config, model, spec, STEP_SIZES[backend])
    activations = Activations.estimate(model, config, sizes)
    adapters = config.num_adapter_slots * slot_bytes(model, tp, config.max_lora_rank, VALUE_BYTES)
    needs = Needs(
        weights=weight_bytes(model, tp, decoder_format(config, text)) + adapters,
        runtime=RUNTIME_BYTES + (RANKS_BYTES if tp > 1 else 0),
        activations=sum(activations),
        step_graphs=step_graph_bytes(model, sizes, config, activations.step),
        tower=0 if vision is None else TOWER_BYTES * vision.hidden_size + early_image_bytes(model, config),
        states=state_bytes(config, spec),
    )
    return divide(config, spec, needs, gpu_memory)


def fit(config: EngineConfig, model: ModelConfig, gpu_memory: int, backend: str) -> EngineConfig:
    """Make steps smaller if the KV pool does not fit. Non-default values are kept."""
    free = [name for name in SMALLEST if getattr(config, name) == getattr(EngineConfig(), name)]
    snapshots = ENOUGH_SNAPSHOTS * model.text.cache_spec(config.tp, VALUE_BYTES).snapshot_blocks(config.block_size)
    enough = 0 if config.kv_cache_memory_bytes is not None else snapshots + ENOUGH_TOKENS // config.block_size
    while (plan := make_plan(config, model, gpu_memory, backend)).spare < 0 or plan.num_blocks < enough:
        name = max(free, key=lambda name: getattr(config, name) / SMALLEST[name], default=None)
        if name is None or getattr(config, name) <= SMALLEST[name]:
            return config
        config = msgspec.structs.replace(config, **{name: getattr(config, name) // 2})
    return config


def cuts(asked: EngineConfig, fitted: EngineConfig) -> str:
    changed = (name for name in SMALLEST if getattr(asked, name) != getattr(fitted, name))
    return ", ".join(f"--{name.replace('_', '-')} {getattr(fitted, name)}" for name in changed)


def describe(config: EngineConfig, model: ModelConfig, name: str, backend: str) -> str:
    """Return the table of `--plan`: a line for --gpu-memory, or for usual cards."""
    lines: list[dict[str, str]] = []
    for memory in (config.gpu_memory,) if config.gpu_memory else tuple(size * GIB for size in CARDS):
        fitted = fit(config, model, memory, backend)
        plan = make_plan(fitted, model, memory, backend)
        line = {"GPU": f"{memory / GIB:.0f}", **plan.parts, "context": "does not fit", "720p kept": "", "smaller steps": ""}
        if plan.num_blocks and plan.spare >= 0:
            line["context"] = f"{min(plan.num_blocks * config.block_size, model.text.max_position_embeddings):,}"
            line["720p kept"] = str(plan.image_cache // (880 * model.num_visual_levels * model.text.hidden_size * VALUE_BYTES))
            line["smaller steps"] = cuts(config, fitted)
        lines.append(line)
    kind = "bfloat16" if (format := decoder_format(config, model.text)) == "plain" else format
    title = f"{name}, decoder in {kind}, --tp {config.tp}, --backend {backend}; sizes in GiB on each GPU, context in tokens"
    rows = ("  ".join(cell.rjust(len(column)) for column, cell in line.items()) for line in lines)
    return "\n".join([title, "  ".join(lines[0]), *rows])
