"""Random weights of any shape, each tensor made on the device when it is read: the same on every rank and for transformers' model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from models.checkpoint.load import fill
from models.checkpoint.names import Index
from models.config.huggingface import read_config
from models.config.types import ModelConfig
from models.decoders.qwen3_vl import Qwen3VL
from models.scaffold import SHAPES, write_model_folder
from models.scaffold.weights import random_tensor, tensor_shapes
from tests.unit.models import reference
from tests.unit.models.harness import Part, Prompt

GAIN = 0.35  # of the layers' matrices: at 1 a random model of 36 layers is chaotic, and two correct bfloat16 runs differ by 3 percent
SEED = 5


def config_of(shape: str, folder: Path) -> ModelConfig:
    write_model_folder(folder, SHAPES[shape], weights="none", seed=0)
    return read_config(folder)


@dataclass
class Generated:
    name: str
    shape: tuple[int, ...]
    device: torch.device

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def __getitem__(self, index: Index) -> torch.Tensor:
        whole = random_tensor(self.name, self.shape, SEED, torch.bfloat16, self.device)
        if whole.dim() > 1 and (".layers." in self.name or ".blocks." in self.name):
            whole *= GAIN
        return whole[index]


class GeneratedSource(dict[str, Generated]):
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__({name: Generated(name, shape, device) for name, shape in tensor_shapes(config).items()})


def fill_generated(model: Qwen3VL) -> None:
    source = GeneratedSource(model.config, model.device)
    names = model.config.architecture.names_of(source)
    fill(model, {known: source[name] for known, name in names.items()}, lambda done, total: None)


def reference_logits(
    make: Callable[..., Any], ours: Qwen3VL, folder: Path, prompts: dict[str, list[Part]], dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """The logits of every token of every prompt by transformers with the same weights; its model is gone afterwards.

    Its experts may be stored transposed.
    """
    with ours.device:
        theirs = make(AutoConfig.from_pretrained(folder), dtype=dtype).eval()
    source = GeneratedSource(ours.config, ours.device)
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            stored = source[name][(slice(None),)]
            tensor.copy_(stored if stored.shape == tensor.shape else stored.transpose(1, 2))
    found = {name: reference.logits(theirs, ours.config, Prompt.build(ours.config, parts)).float() for name, parts in prompts.items()}
    del theirs
    if ours.device.type == "cuda":
        torch.cuda.empty_cache()
    return found
