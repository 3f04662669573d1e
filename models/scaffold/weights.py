"""Seeded random weights under the tensor names of the published checkpoints. Every tensor is a function of (seed, name)."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.checkpoint.names import CheckpointTensor
from models.config.formats import Format
from models.config.huggingface import read_config
from models.config.types import ModelConfig
from models.decoders.contract import make_model
from models.kernels.reference.backend import TorchBackend
from models.parallel.group import TensorParallel
from models.weights.matrix import storage_of

Shapes = dict[str, tuple[int, ...]]

MAX_SHARD_BYTES = 4 << 30
INPUTS_FIRST = 1  # layout of experts, see `StackedExperts`


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Return the name and shape of every tensor of an unquantized checkpoint in the published layout."""
    return {slot.name: slot.shape for slot in _slots(replace(config, text=replace(config.text, format="plain")))}


def _slots(config: ModelConfig) -> Iterator[CheckpointTensor]:
    """Return the tensors that a single rank loads. Experts are stored (inputs, outputs) in Qwen3-VL, (outputs, inputs) in Qwen3.5."""
    backend = TorchBackend(torch.device("meta"))
    for part in make_model(config, TensorParallel.single(), backend, torch.bfloat16).checkpoint_tensors():
        for slot in (part,) if isinstance(part, CheckpointTensor) else part.layouts[0 if config.text.delta is not None else INPUTS_FIRST]:
            yield replace(slot, name=config.text.own_path(slot.name))


def random_tensor(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a random tensor: embeddings of unit scale, matrices of fan_in ** -0.5, norm weights about 1, biases about 0."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode(), seed))  # CPUs use 32 bits
    normal = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    if name.endswith(("embed_tokens.weight", "pos_embed.weight")):
        return normal
    if name.endswith("A_log"):
        return normal.mul_(0.1).sub_(2.0)  # recurrent states decay within about ten tokens
    if ".experts." in name:
        return normal.mul_(shape[1] ** -0.5)
    if len(shape) > 1:
        return normal.mul_(torch.Size(shape[1:]).numel() ** -0.5)
    return normal.mul_(0.1).add_(0.0 if name.endswith(".bias") else 1.0)


def write_random_weights(folder: Path, seed: int, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write safetensors to the folder: one file, or shards with an index if they exceed `max_shard_bytes`."""
    config = read_config(folder, with_head=read_config(folder).text.delta is not None)
    shapes, dtype = tensor_shapes(config), torch_dtype(config.dtype)
    quantized = {slot.name for slot in _slots(config) if slot.target.dtype == torch.float8_e4m3fn}
    shards = list(_shards(shapes, dtype, max_shard_bytes))
    for stale in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        stale.unlink()
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: random_tensor(name, shapes[name], seed, dtype, torch.device("cpu")) for name in names}
        tensors = _quantized(tensors, quantized, config.text.format, has_input_major=config.text.delta is None)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    if len(shards) > 1:
        total = sum(_num_bytes(shape, dtype) for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _quantized(tensors: dict[str, torch.Tensor], names: set[str], format: Format, has_input_major: bool) -> dict[str, torch.Tensor]:
    """Return the tensors with these names in this format and the others unchanged."""
    stored = {name: tensor for name, tensor in tensors.items() if name not in names}
    for name in names & tensors.keys():
        are_experts, tensor = ".experts." in name, tensors[name]
        is_transposed = has_input_major and are_experts
        rows = (tensor.transpose(1, 2) if is_transposed else tensor).flatten(0, -2)
        for each in storage_of(format).quantized(rows).stored:
            whole = each.tensor.unflatten(0, (len(tensor), -1)) if are_experts else each.tensor  # scales have the same layout
            stored[name + each.suffix.removeprefix(".weight")] = (whole.transpose(1, 2) if is_transposed else whole).contiguous()
    return stored


def torch_dtype(name: str) -> torch.dtype:
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"dtype must be one of {', '.join(dtypes)}, got {name!r}")
    return dtypes[name]


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _shards(shapes: Shapes, dtype: torch.dtype, max_bytes: int) -> Iterator[list[str]]:
    """Group names in order within `max_bytes` each; a larger tensor is a group of its own."""
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
