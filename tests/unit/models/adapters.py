"""Writes random adapters as PEFT saves them."""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from models.config.huggingface import read_config
from models.lora.targets import TOWER, targets

SETTINGS: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "modules_to_save": None}


def is_text(module: str) -> bool:
    return not module.startswith(TOWER)


def write(
    folder: Path,
    model_folder: Path,
    seed: int,
    rank: int = 8,
    alpha: float = 16,
    takes: Callable[[str], bool] = is_text,
    ranks: Mapping[str, int] | None = None,
    rename: Callable[[str], str] = str,
    strength: float = 1.0,
    **settings: Any,
) -> Path:
    """An adapter of the modules that `takes` chooses; `ranks` are a `rank_pattern` of ends of paths. B is not zero, as after training."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, ranks = {}, ranks or {}
    names = set()
    for module, (outputs, inputs) in targets(read_config(model_folder)).items():
        if not takes(module):
            continue
        path = rename(module)
        own = next((each for end, each in ranks.items() if path.endswith(end)), rank)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{module}".encode()))
        names.add(path.rpartition(".")[2])
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn((own, inputs), generator=generator) * inputs**-0.5
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn((outputs, own), generator=generator) * (strength * 0.5 * own**-0.5)
    config = SETTINGS | {"r": rank, "lora_alpha": alpha, "target_modules": sorted(names), "rank_pattern": dict(ranks), "alpha_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
