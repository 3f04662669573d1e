"""Interface between the engine and a model; `models.config.registry` names the class of each checkpoint."""

from collections.abc import Iterator, Set
from typing import Protocol

import torch

from models.cache.spec import CacheSpec
from models.checkpoint.names import CheckpointPart
from models.config.registry import imported
from models.config.types import ModelConfig
from models.decoders.batch import ForwardBatch
from models.decoders.head import Predictor
from models.kernels.backend import Backend
from models.kernels.paged import AttentionBackend
from models.parallel.group import TensorParallel
from models.vision.encoder import Tower


class LanguageModel(Protocol):
    """This rank's part of a decoder and its head. Weights are uninitialised until they are loaded."""

    config: ModelConfig
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    tower: Tower | None  # if it accepts images
    predictor: Predictor | None  # if its prediction head was loaded

    def head_tensors(self, names: Set[str]) -> Iterator[CheckpointPart]:
        """Return the target of each tensor of an EAGLE-3 head, whose checkpoint has these tensors."""

    @property
    def cache_spec(self) -> CacheSpec:
        """Return the layout of this rank's cache of a sequence."""

    def __call__(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Return the (S, D) final hidden states of `batch.logits_indices`, whole on every rank, and store the step's keys and values.
        `attention` is planned for the batch."""

    def logits(self, hidden_SD: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        """Return (S, V) float32 over the whole vocabulary on every rank, in `out_SV` if given."""

    def checkpoint_modules(self) -> Iterator[tuple[torch.nn.Module, str]]:
        """Return the modules that hold all weights, and their paths in the checkpoint."""

    def checkpoint_tensors(self) -> Iterator[CheckpointPart]:
        """Return the target of each tensor of the checkpoint."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As in `torch.nn.Module`."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """As in `torch.nn.Module`; some modules hold a `Matrix`."""

    def tie_embeddings(self) -> None:
        """Use the input embedding as the output matrix."""

    def finish(self) -> None:
        """Quantize matrices as configured, and recompute in place what is derived from weights. Call after loading,
        before graphs are captured, and after an update."""


def make_model(config: ModelConfig, tp: TensorParallel, backend: Backend, dtype: torch.dtype) -> LanguageModel:
    """Return this rank's part of the model with uninitialised weights."""
    model: LanguageModel = imported(config.architecture.model)(config, tp, backend, dtype)
    return model
