"""Puts image embeddings where the prompt has placeholders."""

from collections.abc import Sequence

import torch

from models.batch import VisualSlice


def splice_(hidden_TD: torch.Tensor, visual: Sequence[VisualSlice]) -> None:
    """Overwrites the placeholder rows of the token embeddings with the images' main embeddings, in place."""
    for item in visual:
        hidden_TD[item.start : item.start + item.length] = item.embedding[0, item.offset : item.offset + item.length]


def add_deepstack_(hidden_TD: torch.Tensor, visual: Sequence[VisualSlice], level: int) -> None:
    """Adds DeepStack level `level` (from 0) to the image rows, in place; done after decoder layer `level`."""
    for item in visual:
        hidden_TD[item.start : item.start + item.length] += item.embedding[1 + level, item.offset : item.offset + item.length]
