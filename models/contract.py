"""What the engine asks of a model; `models.registry` says which class a checkpoint is of."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from models.attention.paged import AttentionBackend
from models.batch import ForwardBatch, HeadTokens
from models.cache import CacheSpec
from models.config import ModelConfig
from models.geometry import Grid
from models.layers.checkpoint import CheckpointPart
from models.parallel import TensorParallel


class VisionLanguageModel(Protocol):
    """This rank's part of a decoder and its head, and a whole vision tower. Weights are anything until they are loaded."""

    config: ModelConfig
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device

    @property
    def cache_spec(self) -> CacheSpec:
        """What this rank's layers cache of a sequence."""

    def encode(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        """uint8 images (H, W, 3), or frame pairs (2, H, W, 3), on the device, each resized to its grid (t, h, w) in patches -> its
        embeddings (1 + L, N, D), in a storage of its own. One pass of one kind: the caller bounds the patches."""

    def encode_part(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
        """As `encode`, by all ranks at the same time: (1 + L, n, D), the tokens that `part_of` gives this rank of those of all images."""

    def part_bytes(self, grids: Sequence[Grid]) -> int:
        """Device memory that `encode_part` takes at its peak."""

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """(T, D) embeddings of token ids."""

    def __call__(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """(S, D) final hidden states of `batch.logits_indices`, whole on every rank; the step's keys and values are in the pools
        afterwards. `attention` has been planned for the batch."""

    def logits(self, hidden_SD: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        """(S, V) float32 over the whole vocabulary, on every rank; in `out_SV` if given."""

    def predict(
        self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor, places: HeadTokens, attention: AttentionBackend, wanted_S: torch.Tensor
    ) -> torch.Tensor:
        """(S, D): of tokens with these final hidden states, behind which tokens with these embeddings came, what `guesses` makes the tokens
        behind the latter of. Also in place of the hidden states, for the next. `attention` has been planned for the tokens. Only if the
        configuration has a head (`layers.head`)."""

    def guesses(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """(S,) tokens with the largest logits of what `predict` returns, for which the output matrix may be rounded."""

    def checkpoint_tensors(self) -> Iterator[CheckpointPart]:
        """Where each of the checkpoint's tensors goes."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As `torch.nn.Module`: for made-up weights."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The same; some hold matrices in float8."""

    def tie_embeddings(self) -> None:
        """Uses the input embedding as output matrix, in place of its own."""

    def quantize_(self) -> None:
        """Makes the decoder's matrices float8; once, before anything is captured."""

    def round_guesses(self) -> None:
        """Keeps a float8 copy of the output matrix for `guesses`, if it has whole blocks."""

    def kept_bytes(self) -> int:
        """Device memory that what `prepare` makes, and tables of sizes that came, may come to hold."""

    def prepare(self, is_busy: bool = False) -> bool:
        """Some tens of milliseconds of work that pays later, for a time when the host has nothing to launch: False if there is none.
        `is_busy`: the device still works."""
