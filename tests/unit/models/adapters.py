"""Random adapters of the models of tests."""

from pathlib import Path
from typing import Any

from models.config.huggingface import read_config
from models.decoders.qwen3_vl import Qwen3VL
from models.lora.adapter import read_adapter
from models.lora.slots import read_weights
from models.scaffold.adapters import is_text, write_adapter

__all__ = ["is_text", "merge_", "write"]


def write(folder: Path, model_folder: Path, seed: int, **options: Any) -> Path:
    return write_adapter(folder, read_config(model_folder), seed, **options)


def merge_(model: Qwen3VL, folder: Path) -> None:
    weights = read_weights(read_adapter(folder, model.config, 64), model.dtype)
    for part in model.checkpoint_tensors():
        if (found := weights.get(part.name.removesuffix(".weight"))) and part.name.endswith(".weight"):
            part.target.add_((found[1].to(model.device) @ found[0].to(model.device))[part.index])
