"""Random weights of any shape, each tensor made on the device when it is read: the same on every rank and for transformers' model."""

from dataclasses import dataclass
from pathlib import Path

import torch

from models.checkpoint.names import Index
from models.config.huggingface import read_config
from models.config.types import ModelConfig
from models.scaffold import SHAPES, write_model_folder
from models.scaffold.weights import random_tensor, tensor_shapes

GAIN = 0.35  # of the layers' matrices: at 1 a random model of 36 layers is chaotic, and two correct bfloat16 runs differ by 3 percent
SEED = 5


def config_of(shape: str, folder: Path) -> ModelConfig:
    write_model_folder(folder, SHAPES[shape], weights="none", seed=0)
    return read_config(folder)


@dataclass
class Generated:
    """A `Stored` tensor in bfloat16."""

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
    """What `fill` reads."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__({name: Generated(name, shape, device) for name, shape in tensor_shapes(config).items()})
