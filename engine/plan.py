"""How a GPU's memory is divided: for `--plan`, the launcher's cuts on small cards, and a worker's pools.

    memory  x  --gpu-memory-utilization  =
        weights + runtime + activations + captured steps + vision tower + states of rows   +   image cache + KV pool

A worker measures the first six (`engine/worker/memory.py`), everybody else estimates them, by formulas that were fitted to measurements.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields

import msgspec

from engine.config import GIB, MIB, EngineConfig
from engine.messages import MAX_DRAFTS, MAX_EARLY_TOKENS, MAX_GUESSES
from engine.model_sizes import delta_step_values, layer_parameters, stored_layer_parameters, vision_parameters
from models.cache.spec import SPARE_ROWS, CacheSpec
from models.config.types import ModelConfig, VisionConfig
from models.kernels.step_sizes import StepSizes
from models.kernels.triton.tuned import STEP_SIZES

VALUE_BYTES = 2  # bfloat16
BLOCK_SCALE = 1 + 4 / 128**2  # of a float8 value with its share of a scale
GRAPH_BYTES = 4 * MIB  # launches of one captured step
RUNTIME_BYTES, RANKS_BYTES = 7 * GIB // 10, 8 * GIB // 10  # CUDA, kernels, decoder and sampler; what ranks share
TOWER_BYTES = 9 * MIB // 10  # for each value of the tower's width: tables and graphs
LOGITS_BYTES = 24  # for each row and entry of the vocabulary, while rows are drawn by sorting
GPU_IMAGE_CACHE_BYTES = 4 * GIB
LARGEST_IMAGE_BYTES = 512 * MIB  # embeddings of 16,384 tokens of 8B
IMAGE_CACHE_SHARE = 4  # on a small GPU: a fourth of what it and the KV pool have together
ENOUGH_TOKENS, ENOUGH_SNAPSHOTS = 8192, 8  # of the KV pool: for less, steps are made smaller
SMALLEST = {"max_num_batched_tokens": 1024, "max_num_encoder_tokens": 4096, "max_num_seqs": 16}
CARDS = (8, 12, 16, 24, 32, 48, 80, 141)  # GiB


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on each GPU beside the image cache and the KV pool."""

    weights: int
    runtime: int
    activations: int
    step_graphs: int
    tower: int  # tables, graphs, and an image that no plan has named yet
    states: int  # of rows

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        return {field.name.replace("_", " "): size for field, size in zip(fields(self), astuple(self), strict=True)}


@dataclass(frozen=True, slots=True)
class Plan:
    """How a GPU's memory is divided. `kv_pool` is negative by what is lacking, unless a flag fixes it."""

    needs: Needs
    image_cache: int
    kv_pool: int
    block_bytes: int
    spare: int  # negative by what is lacking where flags fix image cache and KV pool

    @property
    def num_blocks(self) -> int:
        return max(0, self.kv_pool) // self.block_bytes

    @property
    def parts(self) -> dict[str, int]:
        """By the names of the table."""
        return {**self.needs.parts, "image cache": self.image_cache, "KV pool": self.kv_pool}


def weight_bytes(model: ModelConfig, tp: int, is_fp8: bool) -> int:
    """On each of `tp` GPUs."""
    text = model.text
    num_layers = text.num_layers + text.has_head
    decoder = num_layers * stored_layer_parameters(text) * (BLOCK_SCALE if is_fp8 else VALUE_BYTES) / tp
    embeddings = (1 if model.tie_word_embeddings else 2) * text.vocab_size * text.hidden_size * VALUE_BYTES / tp
    routers = 0 if text.moe is None else text.num_layers * text.hidden_size * text.moe.num_experts * VALUE_BYTES
    head = 2 * text.hidden_size**2 * VALUE_BYTES + text.vocab_size * text.hidden_size * BLOCK_SCALE / tp if text.has_head else 0
    tower = 0 if model.vision is None else vision_parameters(model.vision) * VALUE_BYTES
    return int(decoder + embeddings + routers + head + tower)


def activation_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """At the peak, of an encode, a step and rows that are drawn."""
    text = model.text
    encode = 0 if model.vision is None else encode_bytes(model.vision, config.max_num_encoder_tokens)
    step = step_bytes(model, config.tp, config.max_num_batched_tokens)
    hidden = VALUE_BYTES * text.hidden_size * max_hidden(config, STEP_SIZES) if text.has_head else 0
    return encode + step + hidden + LOGITS_BYTES * max_draws(config, STEP_SIZES) * text.vocab_size


def encode_bytes(vision: VisionConfig, num_tokens: int) -> int:
    """Of the tower, at its peak."""
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return VALUE_BYTES * (patch + 4 * vision.hidden_size + vision.intermediate_size) * num_tokens * vision.merge_size**2


def step_bytes(model: ModelConfig, tp: int, num_tokens: int) -> int:
    """Of a forward pass, at its peak."""
    text = model.text
    of_token = 3 * text.intermediate_size // tp
    if text.moe is not None:
        of_token = (text.moe.num_experts_per_tok + text.moe.has_shared) * (text.moe.intermediate_size // tp + text.hidden_size)
    if text.delta is not None:
        of_token = max(of_token, delta_step_values(text.delta) // tp)
    return VALUE_BYTES * (of_token + 3 * text.hidden_size) * num_tokens


def max_drafts(config: EngineConfig) -> int:
    """Of a row and step."""
    return {"off": 0, "mtp": MAX_GUESSES}.get(config.draft, MAX_DRAFTS)


def max_hidden(config: EngineConfig, sizes: StepSizes) -> int:
    """Tokens of a step, padded, whose hidden states the model's head reads."""
    return config.max_num_batched_tokens + 2 * max_draws(config, sizes) + sizes.large_step


def max_draws(config: EngineConfig, sizes: StepSizes) -> int:
    """Of a step: one of each row, or several of few rows that verify drafts."""
    return config.max_num_seqs if config.draft == "off" else max(config.max_num_seqs, sizes.verify_rows)


def step_graph_bytes(model: ModelConfig, sizes: StepSizes, config: EngineConfig, activations: int) -> int:
    """At most: launches, shared inputs and logits, and the activations of the largest."""
    chunks, decodes = sizes.chunks_by_rows(config.max_num_seqs), sizes.up_to(sizes.decodes, max_draws(config, sizes))
    num_graphs = len(decodes) + sum(map(len, chunks.values()))
    largest_chunk = max((each[-1] for each in chunks.values()), default=0)
    tokens = max((rows + each[-1] for rows, each in chunks.items()), default=0)
    num_logits = max([*chunks, decodes[-1]]) + sizes.large_step
    logits = 2 * 4 * num_logits * model.text.vocab_size  # shared, and those of the largest while it is captured
    embeddings = model.num_visual_levels * largest_chunk * model.text.hidden_size * VALUE_BYTES
    return num_graphs * GRAPH_BYTES + logits + embeddings + activations * tokens // config.max_num_batched_tokens


def early_image_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """The largest embedding outside the image cache."""
    return min(MAX_EARLY_TOKENS, config.max_num_encoder_tokens) * model.num_visual_levels * model.text.hidden_size * VALUE_BYTES


def divide(config: EngineConfig, spec: CacheSpec, needs: Needs, free: int) -> Plan:
    """What `free` bytes leave beside `needs` goes to the image cache and the KV pool; if a flag fixes one, the other gets the rest."""
    left = int(free * config.gpu_memory_utilization) - needs.total
    block_bytes = spec.block_bytes(config.block_size)
    fixed = fixed_kv_bytes(config, block_bytes)
    share = left // IMAGE_CACHE_SHARE if needs.tower else 0
    rest = share if fixed is None or not needs.tower else max(left - fixed, min(share, LARGEST_IMAGE_BYTES))
    image_cache = config.image_cache_bytes or max(0, min(GPU_IMAGE_CACHE_BYTES, rest))
    kv_pool = left - image_cache if fixed is None else fixed
    return Plan(needs, image_cache, kv_pool, block_bytes, left - image_cache - kv_pool)


def fixed_kv_bytes(config: EngineConfig, block_bytes: int) -> int | None:
    """If a flag says so."""
    return config.kv_cache_memory_bytes if config.num_gpu_blocks_override is None else config.num_gpu_blocks_override * block_bytes


def estimate(config: EngineConfig, model: ModelConfig) -> Needs:
    """Of each GPU."""
    text, tp = model.text, config.tp
    is_fp8 = text.is_fp8 or config.quantization == "fp8"
    kind = text.moe is not None, is_fp8, text.delta is not None
    sizes = STEP_SIZES.for_layers(layer_parameters(text) // tp, config.max_num_batched_tokens, *kind)
    activations = activation_bytes(model, config)
    return Needs(
        weights=weight_bytes(model, tp, is_fp8),
        runtime=RUNTIME_BYTES + (RANKS_BYTES if tp > 1 else 0),
        activations=activations,
        step_graphs=step_graph_bytes(model, sizes, config, activations),
        tower=0 if model.vision is None else TOWER_BYTES * model.vision.hidden_size + early_image_bytes(model, config),
        states=(config.max_num_seqs + 1 + SPARE_ROWS) * text.cache_spec(tp, VALUE_BYTES).row_bytes(max_drafts(config)),
    )


def make_plan(config: EngineConfig, model: ModelConfig, gpu_memory: int) -> Plan:
    return divide(config, model.text.cache_spec(config.tp, VALUE_BYTES), estimate(config, model), gpu_memory)


def fit(config: EngineConfig, model: ModelConfig, gpu_memory: int) -> EngineConfig:
    """Makes steps smaller where the KV pool that flags say, or one of ENOUGH_TOKENS, would not fit. Keeps what differs from its default."""
    defaults = dict(zip(config.__struct_fields__[-len(config.__struct_defaults__) :], config.__struct_defaults__, strict=True))
    free = [name for name in SMALLEST if getattr(config, name) == defaults[name]]
    snapshots = ENOUGH_SNAPSHOTS * model.text.cache_spec(config.tp, VALUE_BYTES).snapshot_blocks(config.block_size)
    while not _is_enough(config, make_plan(config, model, gpu_memory), snapshots):
        name = max(free, key=lambda name: getattr(config, name) / SMALLEST[name], default=None)
        if name is None or getattr(config, name) <= SMALLEST[name]:
            return config
        config = msgspec.structs.replace(config, **{name: getattr(config, name) // 2})
    return config


def _is_enough(config: EngineConfig, plan: Plan, snapshots: int) -> bool:
    is_fixed = fixed_kv_bytes(config, 1) is not None
    return plan.spare >= 0 and (is_fixed or (plan.num_blocks - snapshots) * config.block_size >= ENOUGH_TOKENS)


def cuts(asked: EngineConfig, fitted: EngineConfig) -> str:
    """What `fit` has made smaller, as flags; empty if nothing."""
    changed = (name for name in SMALLEST if getattr(asked, name) != getattr(fitted, name))
    return ", ".join(f"--{name.replace('_', '-')} {getattr(fitted, name)}" for name in changed)


def rows(config: EngineConfig, model: ModelConfig, cards: tuple[int, ...]) -> Iterator[dict[str, str]]:
    """A line of the table for each card of so many bytes."""
    image_bytes = 880 * model.num_visual_levels * model.text.hidden_size * VALUE_BYTES  # of 1280 x 720
    for memory in cards:
        fitted = fit(config, model, memory)
        plan = make_plan(fitted, model, memory)
        line = {"GPU": f"{memory / GIB:.0f}", **{name: f"{size / GIB:.1f}" for name, size in plan.parts.items()}}
        if plan.num_blocks < 1 or plan.spare < 0:
            yield {**line, "context": "does not fit", "720p kept": "", "smaller steps": ""}
        else:
            context = min(plan.num_blocks * config.block_size, model.text.max_position_embeddings)
            kept = str(plan.image_cache // image_bytes)
            yield {**line, "context": f"{context:,}", "720p kept": kept, "smaller steps": cuts(config, fitted)}


def describe(config: EngineConfig, model: ModelConfig, name: str, gpu_memory: int | None) -> str:
    """The table for one card, or for usual ones."""
    cards = (gpu_memory,) if gpu_memory is not None else tuple(size * GIB for size in CARDS)
    table = list(rows(config, model, cards))
    lines = [list(table[0]), *(list(line.values()) for line in table)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_fp8 = model.text.is_fp8 or config.quantization == "fp8"
    title = f"{name}, decoder in {'float8' if is_fp8 else 'bfloat16'}, --tp {config.tp}; sizes in GiB on each GPU, context in tokens"
    return "\n".join([title, *("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)])
