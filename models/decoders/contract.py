"""Interfaces between the engine and a model; `models.config.registry` names the class of each checkpoint.

A `LanguageModel` has a `Tower` if it accepts images, and a `Predictor` if its prediction head was loaded.
"""

from collections.abc import Iterator, Sequence, Set
from typing import Protocol

import torch

from models.cache.spec import CacheSpec
from models.checkpoint.names import CheckpointPart
from models.config.types import ModelConfig
from models.decoders.batch import ForwardBatch
from models.decoders.head import Predictor
from models.kernels.paged import AttentionBackend
from models.media.geometry import Grid
from models.parallel.group import TensorParallel


class Tower(Protocol):
    """Vision tower. The caller bounds the number of patches per call; a call has images or frame pairs, not both."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    uses_graphs: bool  # False while the layers' weights are not those at capture

    def encode(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Return the embeddings (1 + L, N, D) of each uint8 image (H, W, 3) or frame pair (2, H, W, 3) on the device, resized to its grid
        (t, h, w) in patches. Each result has its own storage."""

    def encode_part(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
        """Encode together with all ranks: return (1 + L, n, D), this rank's tokens of all images by `part_of`."""

    def kept_bytes(self) -> int:
        """Return the most device memory that graphs of `prepare` and tables of grids use."""

    def prepare(self, is_busy: bool = False) -> bool:
        """Do some tens of milliseconds of work in advance while the host is idle. Return False if there is none. `is_busy`: the device is
        still working."""

    def finish(self) -> None:
        """Recompute in place what is derived from weights; call after they have changed."""


class LanguageModel(Protocol):
    """This rank's part of a decoder and its head. Weights are uninitialised until they are loaded."""

    config: ModelConfig
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    tower: Tower | None
    predictor: Predictor | None

    def head_tensors(self, names: Set[str]) -> Iterator[CheckpointPart]:
        """Return the target of each tensor of an EAGLE-3 head, whose checkpoint has these tensors by the names of the model."""

    @property
    def cache_spec(self) -> CacheSpec:
        """Return the layout of this rank's cache of a sequence."""

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the (T, D) embeddings of token ids."""

    def __call__(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Return the (S, D) final hidden states of `batch.logits_indices`, whole on every rank, and store the step's keys and values.
        `attention` has been planned for the batch."""

    def logits(self, hidden_SD: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        """Return (S, V) float32 over the whole vocabulary on every rank, in `out_SV` if given."""

    def checkpoint_modules(self) -> Iterator[tuple[torch.nn.Module, str]]:
        """Return the modules that hold all weights, and their paths in the checkpoint."""

    def checkpoint_tensors(self) -> Iterator[CheckpointPart]:
        """Return the target of each tensor of the checkpoint."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As in `torch.nn.Module`, for dummy weights."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """As in `torch.nn.Module`; some modules hold a `Matrix`."""

    def tie_embeddings(self) -> None:
        """Use the input embedding as the output matrix."""

    def finish(self) -> None:
        """Quantize matrices as configured, and recompute in place what is derived from weights. Call after loading, before graphs are
        captured, and after an update."""
