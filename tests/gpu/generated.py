"""Random weights of any shape, each tensor made on the device when it is read: the same on every rank and for transformers' model."""

from pathlib import Path

import torch

from models.config import ModelConfig
from models.layers.checkpoint import Index
from models.scaffold import SHAPES, write_model_folder
from models.scaffold.weights import random_tensor, tensor_shapes

GAIN = 0.35  # of the layers' matrices: at 1 a random model of 36 layers is chaotic, and two correct bfloat16 runs differ by 3 percent
SEED = 5


def config_of(shape: str, folder: Path) -> ModelConfig:
    write_model_folder(folder, SHAPES[shape], weights="none", seed=0)
    return ModelConfig.from_folder(folder)


class GeneratedSource:
    """A `WeightSource` in bfloat16."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._shapes = tensor_shapes(config)
        self._device = device

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, index: Index) -> torch.Tensor:
        whole = random_tensor(name, self._shapes[name], SEED, torch.bfloat16, self._device)
        if whole.dim() > 1 and (".layers." in name or ".blocks." in name):
            whole *= GAIN
        return whole[index]
