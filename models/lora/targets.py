"""Modules that an adapter may change, with the shapes of their matrices. Imports no torch."""

import re
from collections.abc import Iterator

from models.config.types import ModelConfig, TextConfig, VisionConfig

RANK_STEP = 16  # ranks of slots are multiples, for matrix units
TOWER = "model.visual."
ROW_PARALLEL = re.compile(r"\.(o_proj|down_proj|out_proj)$")

Shape = tuple[int, int]  # outputs, inputs


def targets(config: ModelConfig) -> dict[str, Shape]:
    """Map paths of modules, as the model names them, to shapes."""
    vision = () if config.vision is None else _of_tower(config.vision)
    return {**dict(_of_decoder(config.text)), **{TOWER + path: shape for path, shape in vision}}


def slot_bytes(config: ModelConfig, tp: int, rank: int, value_bytes: int) -> int:
    """Return the bytes of one slot for adapters of this rank on each of `tp` GPUs."""
    total, rank = 0, -(-rank // RANK_STEP) * RANK_STEP
    for path, (outputs, inputs) in targets(config).items():
        if not path.startswith(TOWER):
            outputs, inputs = (outputs, inputs // tp) if ROW_PARALLEL.search(path) else (outputs // tp, inputs)
        total += rank * (outputs + inputs)
    return total * value_bytes


def _of_decoder(text: TextConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner, delta = text.hidden_size, text.intermediate_size, text.delta
    heads, kv_heads = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
    for layer in range(text.num_layers):
        mixer = f"{text.layer_path(layer)}.self_attn"
        if delta is not None and layer in text.delta_layers:
            values = delta.num_value_heads * delta.value_dim
            yield f"{mixer}.in_proj_qkv", (delta.conv_width, hidden)
            yield f"{mixer}.in_proj_z", (values, hidden)
            yield f"{mixer}.in_proj_b", (delta.num_value_heads, hidden)
            yield f"{mixer}.in_proj_a", (delta.num_value_heads, hidden)
            yield f"{mixer}.out_proj", (hidden, values)
        else:
            yield f"{mixer}.q_proj", (heads if delta is None else 2 * heads, hidden)  # with the gate
            yield f"{mixer}.k_proj", (kv_heads, hidden)
            yield f"{mixer}.v_proj", (kv_heads, hidden)
            yield f"{mixer}.o_proj", (hidden, heads)
        if text.moe is None:
            mlp = f"{text.layer_path(layer)}.mlp"
            yield f"{mlp}.gate_proj", (inner, hidden)
            yield f"{mlp}.up_proj", (inner, hidden)
            yield f"{mlp}.down_proj", (hidden, inner)


def _of_tower(vision: VisionConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner, merged = vision.hidden_size, vision.intermediate_size, vision.hidden_size * vision.merge_size**2
    for block in range(vision.depth):
        yield f"blocks.{block}.attn.qkv", (3 * hidden, hidden)
        yield f"blocks.{block}.attn.proj", (hidden, hidden)
        yield f"blocks.{block}.mlp.linear_fc1", (inner, hidden)
        yield f"blocks.{block}.mlp.linear_fc2", (hidden, inner)
    for merger in ("merger", *(f"deepstack_merger_list.{level}" for level in range(len(vision.deepstack_indexes)))):
        yield f"{merger}.linear_fc1", (merged, merged)
        yield f"{merger}.linear_fc2", (vision.out_hidden_size, merged)
