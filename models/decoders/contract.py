"""What the engine asks of a model; `models.config.registry` names the class of each checkpoint.

A `LanguageModel` has a `Tower` if it takes images, and a `Drafter` if its own head for drafts was read.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from models.cache.spec import CacheSpec
from models.checkpoint.names import CheckpointPart
from models.config.types import ModelConfig
from models.decoders.batch import ForwardBatch, HeadTokens
from models.kernels.paged import AttentionBackend
from models.media.geometry import Grid
from models.parallel.group import TensorParallel


class Tower(Protocol):
    """A whole vision tower. Its caller bounds the patches of a call; a call has images or frame pairs, not both."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def encode(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        """uint8 images (H, W, 3), or frame pairs (2, H, W, 3), on the device, each resized to its grid (t, h, w) in patches -> its
        embeddings (1 + L, N, D), in a storage of its own."""

    def encode_part(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
        """As `encode`, by all ranks at the same time: (1 + L, n, D), the tokens that `part_of` gives this rank of those of all images."""

    def part_bytes(self, grids: Sequence[Grid]) -> int:
        """Device memory that `encode_part` takes at its peak."""

    def kept_bytes(self) -> int:
        """Device memory that graphs made by `prepare` and tables of grids may come to hold."""

    def prepare(self, is_busy: bool = False) -> bool:
        """Some tens of milliseconds of work that pays later, for a time when the host has nothing to launch: False if there is none.
        `is_busy`: the device still works."""


class Drafter(Protocol):
    """A model's own head for drafts, see `layers.head`."""

    def predict(
        self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor, places: HeadTokens, attention: AttentionBackend, wanted_S: torch.Tensor
    ) -> torch.Tensor:
        """(S, D), of which `guesses` makes draft tokens, for tokens with these final hidden states that are followed by tokens with these
        embeddings. It also takes the place of the hidden states in the next call. `attention` has been planned for the tokens."""

    def guesses(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """(S,) tokens with the largest logits of what `predict` returns, for which the output matrix may be rounded."""

    def round_guesses(self) -> None:
        """Keep a float8 copy of the output matrix for `guesses`, if it has whole blocks."""


class LanguageModel(Protocol):
    """This rank's part of a decoder and its head. Weights are anything until they are loaded."""

    config: ModelConfig
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    tower: Tower | None
    drafter: Drafter | None

    @property
    def cache_spec(self) -> CacheSpec:
        """What this rank's layers cache of a sequence."""

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """(T, D) embeddings of token ids."""

    def __call__(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """(S, D) final hidden states of `batch.logits_indices`, whole on every rank; the step's keys and values are in the pools
        afterwards. `attention` has been planned for the batch."""

    def logits(self, hidden_SD: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        """(S, V) float32 over the whole vocabulary, on every rank; in `out_SV` if given."""

    def checkpoint_tensors(self) -> Iterator[CheckpointPart]:
        """Where each of the checkpoint's tensors goes."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As `torch.nn.Module`: for made-up weights."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The same; some hold a `Matrix`."""

    def tie_embeddings(self) -> None:
        """Use the input embedding as output matrix, in place of its own."""

    def finish(self) -> None:
        """Quantize matrices as the configuration says; once, after weights are loaded and before anything is captured."""
