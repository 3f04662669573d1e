"""What a folder of an adapter may hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.wire.adapters import named_adapters
from engine.wire.config import EngineConfig
from models.config.huggingface import read_config
from models.config.types import ModelConfig
from models.lora.adapter import read_adapter
from models.lora.targets import targets
from models.scaffold import SHAPES, write_model_folder
from tests.unit.models import adapters

LAYER = "base_model.model.model.language_model.layers.0."
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "DoRA"),
    ({"bias": "lora_only"}, "trained biases"),
    ({"modules_to_save": ["lm_head"]}, "whole modules"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "parameters of experts"),
    ({"peft_type": "IA3"}, "peft_type must be LORA"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
    ({"r": 9}, "has rank 8, adapter_config.json has 9"),
    ({"lora_alpha": "16"}, "must be a number"),
    ({"lora_alpha": 10**400}, "must be a number up to"),
    ({"lora_alpha": float("nan")}, "must be a number up to"),
    ({"alpha_pattern": {r"(([a-z_]+)+\.?)+x": 3}}, "alpha_pattern must map names"),
    ({"rank_pattern": [8]}, "rank_pattern must map names"),
    ({"rank_pattern": {"self_attn.q_proj": 9}}, "q_proj has rank 8, adapter_config.json has 9"),
]
TENSORS: list[tuple[dict[str, tuple[int, ...]], str]] = [
    ({"base_model.model.lm_head.weight": (4096, 128)}, "more than lora_A and lora_B of linear layers: base_model.model.lm_head.weight"),
    ({LAYER + "self_attn.q_proj.lora_A.weight": (8, 100)}, "the model requires"),
    ({LAYER + "self_attn.q_norm.lora_A.weight": (8, 128), LAYER + "self_attn.q_norm.lora_B.weight": (128, 8)}, "no such linear layers"),
    ({LAYER + "self_attn.x_proj.lora_A.weight": (8, 128)}, "lacks .*x_proj.lora_B.weight"),
]


@pytest.fixture
def config(tiny_folder: Path) -> ModelConfig:
    return read_config(tiny_folder)


@pytest.mark.parametrize(("settings", "words"), SETTINGS, ids=[words for _, words in SETTINGS])
def test_refused_settings(config: ModelConfig, tiny_folder: Path, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    adapters.write(tmp_path, tiny_folder, 1, **settings)
    with pytest.raises(ValueError, match=words):
        read_adapter(tmp_path, config, 8)


@pytest.mark.parametrize(("tensors", "words"), TENSORS, ids=[words for _, words in TENSORS])
def test_refused_tensors(config: ModelConfig, tiny_folder: Path, tmp_path: Path, tensors: dict[str, tuple[int, ...]], words: str) -> None:
    file = adapters.write(tmp_path, tiny_folder, 1) / "adapter_model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(shape) for name, shape in tensors.items()}, file)
    with pytest.raises(ValueError, match=words):
        read_adapter(tmp_path, config, 8)


def test_refused_files(config: ModelConfig, tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        read_adapter(tmp_path, config, 8)
    adapters.write(tmp_path, tiny_folder, 1)
    with pytest.raises(ValueError, match="the rank 8 exceeds --max-lora-rank 4"):
        read_adapter(tmp_path, config, 4)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="malformed"):
        read_adapter(tmp_path, config, 8)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match="pickle"):
        read_adapter(tmp_path, config, 8)
    (tmp_path / "adapter_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(ValueError, match="not JSON"):
        read_adapter(tmp_path, config, 8)


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", SHAPES["tiny-moe"], weights="none", seed=1)
    adapter = adapters.write(tmp_path / "adapter", tmp_path / "model", 1)
    file = adapter / "adapter_model.safetensors"
    experts = {LAYER + f"mlp.experts.3.up_proj.lora_{name}.weight": torch.zeros(8, 8) for name in "AB"}
    save_file(load_file(file) | experts, file)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.3\.up_proj are not supported: experts and their router"):
        read_adapter(adapter, read_config(tmp_path / "model"), 8)


@pytest.mark.parametrize("name", ["tiny", "3.5-tiny"])
def test_shapes_are_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    write_model_folder(tmp_path, SHAPES[name], weights="random", seed=1)
    config = read_config(tmp_path)
    stored = {config.architecture.known_name(name): x for name, x in load_file(tmp_path / "model.safetensors").items()}
    for module, shape in targets(config).items():
        assert tuple(stored[f"{module}.weight"].shape) == shape
    matrices = {name.removesuffix(".weight") for name, x in stored.items() if x.dim() == 2 and not name.startswith("mtp.")}
    others = {module.rpartition(".")[2] for module in matrices - targets(config).keys()}
    assert others <= {"embed_tokens", "lm_head", "pos_embed"}


def test_modules_of_the_command_line(tiny_folder: Path, tmp_path: Path, config: ModelConfig) -> None:
    a, b = (str(adapters.write(tmp_path / name, tiny_folder, 1)) for name in ("a", "b=c"))
    found = named_adapters(f"x={a} y={b}", EngineConfig().max_lora_rank, config, ["base"])
    assert [(each.name, each.folder, each.number) for each in found] == [("x", a, 1), ("y", b, 2)]
    for text, words in (
        ("x", "must be name=folder"), (f"x={a} x={b}", "x: the name is already"), (f"base={a}", "already used"),
        ("x=/nowhere", "x: there is no adapter_config.json"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            named_adapters(text, EngineConfig().max_lora_rank, config, ["base"])
