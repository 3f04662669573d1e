"""Makes the model that a configuration names."""

from importlib import import_module

import torch

from models.config.types import ModelConfig
from models.decoders.contract import LanguageModel
from models.kernels.backend import Backend
from models.parallel.group import TensorParallel


def make_model(config: ModelConfig, tp: TensorParallel, backend: Backend, dtype: torch.dtype) -> LanguageModel:
    """This rank's part, without values."""
    module, _, name = config.architecture.model.partition(":")
    model: LanguageModel = vars(import_module(module))[name](config, tp, backend, dtype)
    return model
