"""The explicit input of one forward pass of the decoder.

Shape legend used in all of `models/`: T tokens of the step, R rows (sequences) of the step, P patches, V vocabulary, D hidden size, H
heads, K head_dim, B batch, L DeepStack levels, N tokens of one image.
"""

from dataclasses import dataclass

import torch

from models.cache.layout import AttentionLayout
from models.cache.states import RowStates
from models.kernels.ops import StateRows
from models.kernels.stream import RowClass


@dataclass(frozen=True, slots=True)
class VisualSlice:
    """Tokens `start : start + length` of the step are image tokens `offset : offset + length` of `embedding`."""

    start: int
    length: int
    offset: int
    embedding: torch.Tensor  # (1 + L, N, D): the main embedding, then one per DeepStack level

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.length)

    def level(self, index: int) -> torch.Tensor:
        """Return (length, D) of a level."""
        return self.embedding[index, self.offset : self.offset + self.length]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Input of one step. No logits are computed if `logits_indices` is empty (a chunk in the middle of a prompt)."""

    input_ids_T: torch.Tensor  # int64 on the device; `visual` overwrites image placeholders
    positions_3T: torch.Tensor  # (3, T) int64 on the device: M-RoPE positions (time, height, width)
    attention: AttentionLayout
    visual: tuple[VisualSlice, ...]
    logits_indices: torch.Tensor  # (S,) int64 on the device, ascending: tokens whose logits are wanted
    states: tuple[RowStates, ...] = ()  # one for each state group
    rows: StateRows | None = None  # only for models with states
    padding_slot: int | None = None  # KV slot of padding tokens; None: there are none
    hidden_TX: torch.Tensor | None = None  # receives what the head reads of all tokens: final hidden states, or inputs of some layers
    row_class: RowClass | None = None  # of all products; None: that of the step's tokens
    adapters_T: torch.Tensor | None = None  # int32 on the device: slots of the tokens' adapters, -1: none; None: no token has one


@dataclass(frozen=True, slots=True)
class HeadTokens:
    positions_3T: torch.Tensor  # as in `ForwardBatch`
    slots_T: torch.Tensor  # int64 on the device: KV slots of the tokens
