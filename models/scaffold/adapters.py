"""Random LoRA adapters as PEFT saves them, for tests and benchmarks."""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from models.config.types import ModelConfig
from models.lora.adapter import CONFIG, OF_A, OF_B, PREFIX, WEIGHTS
from models.lora.targets import TOWER, targets

SETTINGS: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "modules_to_save": None}


def is_text(module: str) -> bool:
    return not module.startswith(TOWER)


def write_adapter(
    folder: Path,
    model: ModelConfig,
    seed: int,
    rank: int = 8,
    alpha: float = 16,
    takes: Callable[[str], bool] = is_text,
    ranks: Mapping[str, int] | None = None,
    rename: Callable[[str], str] = str,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Write an adapter for the modules that `takes` accepts and return the folder. `ranks`: a `rank_pattern` with suffixes of paths;
    `rename`: from paths to those of the checkpoint; `settings`: more entries of adapter_config.json. B is not zero."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    names, ranks = set[str](), ranks or {}
    for module, (outputs, inputs) in targets(model).items():
        if takes(module):
            path = rename(module)
            own = next((each for end, each in ranks.items() if path.endswith(end)), rank)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{module}".encode()))
            a = torch.randn((own, inputs), generator=generator) * inputs**-0.5
            b = torch.randn((outputs, own), generator=generator) * (0.5 * strength * own**-0.5)
            tensors |= {PREFIX + path + OF_A: a.to(dtype), PREFIX + path + OF_B: b.to(dtype)}
            names.add(path.rpartition(".")[2])
    config = SETTINGS | {"r": rank, "lora_alpha": alpha, "target_modules": sorted(names), "rank_pattern": dict(ranks), "alpha_pattern": {}}
    (folder / CONFIG).write_text(json.dumps(config | settings), encoding="utf-8")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder
