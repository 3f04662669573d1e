"""Reader of an adapter's folder as PEFT writes it: adapter_config.json and adapter_model.safetensors. Imports no torch."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from models.config.types import ModelConfig
from models.lora.targets import TOWER, targets

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX, OF_A, OF_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
REFUSED = {  # settings that change more than the low-rank product, and their names for users
    "use_dora": "DoRA",
    "lora_bias": "a bias of lora_B",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "embeddings of tokens",
    "target_parameters": "parameters of experts",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "fan_in_fan_out": "transposed matrices",
}
MAX_ALPHA = 1_000_000
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the model's own weights


@dataclass(frozen=True, slots=True)
class Target:
    """Low-rank change of a module: scale * B @ A is added to its matrix."""

    module: str  # as the model names it
    prefix: str  # of the names of A and B in the file
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    folder: Path
    targets: tuple[Target, ...]

    @property
    def has_tower(self) -> bool:
        """Return whether it changes embeddings of images."""
        return any(target.module.startswith(TOWER) for target in self.targets)


def read_adapter(folder: Path, model: ModelConfig, max_rank: int) -> Adapter:
    """Return the adapter of a folder. ValueError or OSError, which name what is missing, malformed or unsupported."""
    config = _read_config(folder)
    known, refused = targets(model), []
    found: list[Target] = []
    for prefix, of_a, of_b in _pairs(_read_shapes(folder)):
        path = prefix.removeprefix(PREFIX)
        module = model.architecture.known_name(f"{path}.weight").removesuffix(".weight")
        if module not in known:
            refused.append(path)
            continue
        rank, (outputs, inputs) = of_a[0] if of_a else 0, known[module]
        if rank < 1 or of_a != (rank, inputs) or of_b != (outputs, rank):
            shapes = f"shapes {of_a} and {of_b}, the model requires (r, {inputs}) and ({outputs}, r)"
            raise ValueError(f"lora_A and lora_B of {path} have {shapes}")
        found.append(Target(module, prefix, rank, _scale(config, path, rank)))
    if refused:
        raise ValueError(f"adapters of {_listed(refused)} are not supported{_advice(model, refused)}")
    if not found:
        raise ValueError(f"{WEIGHTS} changes no module")
    if (largest := max(target.rank for target in found)) > max_rank:
        raise ValueError(f"the rank {largest} exceeds --max-lora-rank {max_rank}")
    return Adapter(folder, tuple(found))


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"there is no {CONFIG}: a folder as PEFT writes it is needed")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{CONFIG} is not JSON: {problem}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type must be LORA, got {config.get('peft_type') if isinstance(config, dict) else config!r}")
    for name, what in REFUSED.items():
        if config.get(name):
            raise ValueError(f"{what} ({name}) is not supported: merge the adapter into the weights")
    if config.get("bias", "none") != "none":
        raise ValueError(f"trained biases (bias: {config['bias']!r}) are not supported: merge the adapter into the weights")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(CHANGES_BASE):
        raise ValueError(f"init_lora_weights {start!r} changes the model's own weights: convert the adapter when saving it")
    return config


def _read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the file."""
    if not (folder / WEIGHTS).is_file():
        if (folder / PICKLE).is_file():
            raise ValueError(f"{PICKLE} is a pickle, which could run code: save the adapter as {WEIGHTS}")
        raise ValueError(f"there is no {WEIGHTS}")
    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as problem:
        raise ValueError(f"{WEIGHTS} is malformed: {problem}") from None


def _pairs(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return the prefix of each A and B, and their shapes. ValueError for other tensors."""
    others = sorted(name for name in shapes if not name.endswith((OF_A, OF_B)))
    if others:
        raise ValueError(f"{WEIGHTS} has more than lora_A and lora_B of linear layers: {_listed(others)}")
    for prefix in dict.fromkeys(name.removesuffix(OF_A).removesuffix(OF_B) for name in shapes):
        if missing := [suffix for suffix in (OF_A, OF_B) if prefix + suffix not in shapes]:
            raise ValueError(f"{WEIGHTS} lacks {prefix}{missing[0]}")
        yield prefix, shapes[prefix + OF_A], shapes[prefix + OF_B]


def _scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    """Return alpha / r, or alpha / sqrt(r) with rsLoRA. ValueError if the file's rank is not the configured one."""
    configured = _by_pattern(config, "rank_pattern", path, config.get("r"))
    if configured != rank:
        raise ValueError(f"lora_A of {path} has rank {rank}, {CONFIG} has {configured}")
    alpha = _by_pattern(config, "alpha_pattern", path, config.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise ValueError(f"lora_alpha of {path} must be a number up to {MAX_ALPHA}, got {str(alpha)[:100]}")
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(config: Mapping[str, Any], name: str, path: str, default: Any) -> Any:
    """Return the value of the first name that is the path or its end. ValueError for regular expressions."""
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict) or not all(re.fullmatch(r"[\w.]+", key) for key in patterns):
        raise ValueError(f"{name} must map names of modules, without other characters of regular expressions, to numbers")
    return next((value for key, value in patterns.items() if f".{path}".endswith(f".{key}")), default)


def _advice(model: ModelConfig, refused: Iterable[str]) -> str:
    has_experts = model.text.moe is not None and any(".mlp." in path for path in refused)
    return ": experts and their router cannot be adapted" if has_experts else ": this model has no such linear layers"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
