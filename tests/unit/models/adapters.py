"""Random adapters of the models of tests."""

from pathlib import Path
from typing import Any

from models.config.huggingface import read_config
from models.scaffold.adapters import is_text, write_adapter

__all__ = ["is_text", "write"]


def write(folder: Path, model_folder: Path, seed: int, **options: Any) -> Path:
    return write_adapter(folder, read_config(model_folder), seed, **options)
