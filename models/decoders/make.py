"""Construct the model that a configuration names."""

import torch

from models.config.registry import imported
from models.config.types import ModelConfig
from models.decoders.contract import LanguageModel
from models.kernels.backend import Backend
from models.parallel.group import TensorParallel


def make_model(config: ModelConfig, tp: TensorParallel, backend: Backend, dtype: torch.dtype) -> LanguageModel:
    """Return this rank's part of the model with uninitialised weights."""
    model: LanguageModel = imported(config.architecture.model)(config, tp, backend, dtype)
    return model
