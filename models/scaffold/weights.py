"""Seeded random weights under the tensor names of the published checkpoints. Used by the scaffold and by tests that compare models.

Every tensor is a function of (seed, name), so any process can make any of them alone, on any device of one kind.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.config.huggingface import read_config
from models.config.types import ModelConfig, TextConfig, VisionConfig
from models.weights.float8 import BlockScaled

Shapes = dict[str, tuple[int, ...]]

MAX_SHARD_BYTES = 4 << 30
FLOAT8_MATRICES = ("_proj.weight", ".in_proj_qkv.weight", ".in_proj_z.weight")


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor of a checkpoint, as the published ones name them."""
    shapes = ({} if config.vision is None else _vision_shapes(config.vision)) | _text_shapes(config.text)
    if config.text.has_head:
        shapes |= _head_shapes(config.text)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.text.vocab_size, config.text.hidden_size)
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Embeddings of unit scale, matrices of fan_in ** -0.5 (activations keep their scale), norm weights about 1, biases about 0."""
    generator = torch.Generator(device).manual_seed(seed << 32 | zlib.crc32(name.encode()))
    normal = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    if name.endswith(("embed_tokens.weight", "pos_embed.weight")):
        return normal
    if name.endswith("A_log"):
        return normal.mul_(0.1).sub_(2.0)  # a state lasts for some ten tokens
    if _is_experts(name):
        return normal.mul_(shape[1] ** -0.5)
    if len(shape) > 1:
        return normal.mul_(torch.Size(shape[1:]).numel() ** -0.5)
    return normal.mul_(0.1).add_(0.0 if name.endswith(".bias") else 1.0)


def write_random_weights(folder: Path, seed: int, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes safetensors beside the folder's config.json: one file, or shards with an index when they exceed `max_shard_bytes`."""
    config = read_config(folder, with_head=read_config(folder).text.delta is not None)
    shapes, dtype = tensor_shapes(config), torch_dtype(config.dtype)
    shards = list(_shards(shapes, dtype, max_shard_bytes))
    for stale in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        stale.unlink()
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: random_tensor(name, shapes[name], seed, dtype, torch.device("cpu")) for name in names}
        if config.text.is_fp8:
            tensors = _quantized(tensors, has_input_major=config.text.delta is None)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    if len(shards) > 1:
        total = sum(_num_bytes(shape, dtype) for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _quantized(tensors: dict[str, torch.Tensor], has_input_major: bool) -> dict[str, torch.Tensor]:
    """The decoder's matrices as float8 values and scales, the others as they are, and those of the gates."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if _is_experts(name):  # their scales lie as they do
            matrix = BlockScaled.quantized((tensor.transpose(1, 2) if has_input_major else tensor).flatten(0, 1))
            parts = (part.contiguous().unflatten(0, (len(tensor), -1)) for part in (matrix.values, matrix.scales))
            values, scales = ((part.transpose(1, 2) if has_input_major else part).contiguous() for part in parts)
            stored |= {name: values, f"{name}_scale_inv": scales}
        elif name.startswith(("model.language_model.layers.", "mtp.layers.")) and name.endswith(FLOAT8_MATRICES):
            matrix = BlockScaled.quantized(tensor)
            stored |= {name: matrix.values, f"{name}_scale_inv": matrix.scales.contiguous()}
        else:
            stored[name] = tensor
    return stored


def _is_experts(name: str) -> bool:
    """Whether a tensor has the matrices of all experts, (experts, inputs, outputs)."""
    return ".experts." in name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a `ModelConfig.dtype`. ValueError for any other name."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"dtype must be one of {', '.join(dtypes)}, got {name!r}")
    return dtypes[name]


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _shards(shapes: Shapes, dtype: torch.dtype, max_bytes: int) -> Iterator[list[str]]:
    """Names grouped in order so that each group stays within `max_bytes`; a single larger tensor is a group of its own."""
    group: list[str] = []
    size = 0
    for name, shape in shapes.items():
        num_bytes = _num_bytes(shape, dtype)
        if group and size + num_bytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += num_bytes
    yield group


def _linear(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _layer_norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _vision_shapes(vision: VisionConfig) -> Shapes:
    hidden, inner = vision.hidden_size, vision.intermediate_size
    kernel = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    shapes: Shapes = {
        "model.visual.patch_embed.proj.weight": (hidden, *kernel),
        "model.visual.patch_embed.proj.bias": (hidden,),
        "model.visual.pos_embed.weight": (vision.num_position_embeddings, hidden),
    }
    for i in range(vision.depth):
        block = f"model.visual.blocks.{i}"
        shapes |= _layer_norm(f"{block}.norm1", hidden) | _layer_norm(f"{block}.norm2", hidden)
        shapes |= _linear(f"{block}.attn.qkv", 3 * hidden, hidden) | _linear(f"{block}.attn.proj", hidden, hidden)
        shapes |= _linear(f"{block}.mlp.linear_fc1", inner, hidden) | _linear(f"{block}.mlp.linear_fc2", hidden, inner)
    merged = hidden * vision.merge_size**2
    mergers = {"model.visual.merger": hidden}  # this one normalises before the patches of a block are joined, the others after
    mergers |= {f"model.visual.deepstack_merger_list.{i}": merged for i in range(len(vision.deepstack_indexes))}
    for merger, norm_size in mergers.items():
        shapes |= _layer_norm(f"{merger}.norm", norm_size)
        shapes |= _linear(f"{merger}.linear_fc1", merged, merged) | _linear(f"{merger}.linear_fc2", vision.out_hidden_size, merged)
    return shapes


def _text_shapes(text: TextConfig) -> Shapes:
    hidden = text.hidden_size
    shapes: Shapes = {"model.language_model.embed_tokens.weight": (text.vocab_size, hidden)}
    for i in range(text.num_layers):
        layer = f"model.language_model.layers.{i}"
        shapes |= _layer_shapes(layer, text)
        delta = i in text.delta_layers
        shapes |= _delta_shapes(f"{layer}.linear_attn", text) if delta else _attention_shapes(f"{layer}.self_attn", text)
    return shapes | {"model.language_model.norm.weight": (hidden,)}


def _head_shapes(text: TextConfig) -> Shapes:
    hidden, layer = text.hidden_size, "mtp.layers.0"
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes: Shapes = {"mtp.fc.weight": (hidden, 2 * hidden)} | {f"mtp.{name}.weight": (hidden,) for name in norms}
    return shapes | _layer_shapes(layer, text) | _attention_shapes(f"{layer}.self_attn", text)


def _layer_shapes(layer: str, text: TextConfig) -> Shapes:
    norms: Shapes = {f"{layer}.{name}layernorm.weight": (text.hidden_size,) for name in ("input_", "post_attention_")}
    return norms | _mlp_shapes(f"{layer}.mlp", text)


def _attention_shapes(name: str, text: TextConfig) -> Shapes:
    hidden, queries, keys = text.hidden_size, text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
    return {
        f"{name}.q_proj.weight": (queries * (1 if text.delta is None else 2), hidden),
        f"{name}.k_proj.weight": (keys, hidden),
        f"{name}.v_proj.weight": (keys, hidden),
        f"{name}.q_norm.weight": (text.head_dim,),
        f"{name}.k_norm.weight": (text.head_dim,),
        f"{name}.o_proj.weight": (hidden, queries),
    }


def _delta_shapes(name: str, text: TextConfig) -> Shapes:
    delta, hidden = text.delta, text.hidden_size
    assert delta is not None
    heads, width = delta.num_value_heads, delta.num_value_heads * delta.value_dim
    return {
        f"{name}.in_proj_qkv.weight": (delta.conv_width, hidden),
        f"{name}.in_proj_z.weight": (width, hidden),
        f"{name}.in_proj_b.weight": (heads, hidden),
        f"{name}.in_proj_a.weight": (heads, hidden),
        f"{name}.conv1d.weight": (delta.conv_width, 1, delta.kernel_size),
        f"{name}.A_log": (heads,),
        f"{name}.dt_bias": (heads,),
        f"{name}.norm.weight": (delta.value_dim,),
        f"{name}.out_proj.weight": (hidden, width),
    }


def _swiglu_shapes(name: str, hidden: int, inner: int) -> Shapes:
    return {f"{name}.{part}_proj.weight": (hidden, inner) if part == "down" else (inner, hidden) for part in ("gate", "up", "down")}


def _mlp_shapes(name: str, text: TextConfig) -> Shapes:
    hidden = text.hidden_size
    if text.moe is None:
        return _swiglu_shapes(name, hidden, text.intermediate_size)
    count, inner = text.moe.num_experts, text.moe.intermediate_size
    if text.moe.has_shared:
        return {
            f"{name}.gate.weight": (count, hidden),
            f"{name}.experts.gate_up_proj": (count, 2 * inner, hidden),
            f"{name}.experts.down_proj": (count, hidden, inner),
            f"{name}.shared_expert_gate.weight": (1, hidden),
            **_swiglu_shapes(f"{name}.shared_expert", hidden, inner),
        }
    return {
        f"{name}.gate.weight": (count, hidden),
        f"{name}.experts.gate_up_proj": (count, hidden, 2 * inner),
        f"{name}.experts.down_proj": (count, inner, hidden),
    }
