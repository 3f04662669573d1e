"""Multimodal rotary positions of a prompt, in numpy."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from models.media.geometry import Grid

Positions = npt.NDArray[np.int64]


def mrope_positions(num_tokens: int, spans: Sequence[tuple[int, Grid]]) -> tuple[Positions, int]:
    """Return positions (3, num_tokens) in (time, height, width) and the delta: a token i >= num_tokens is at i + delta on all axes.

    `spans` are (first placeholder token, grid in tokens (t, h, w)), ascending and not overlapping. Text counts up on all three axes. An
    item starts at the next position p: its tokens are at (p + t, p + h, p + w), and text continues at p + max(h, w), as in transformers'
    `Qwen3VLModel.get_rope_index`. ValueError if the spans do not fit.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    token, position = 0, 0
    for start, (t, h, w) in spans:
        end = start + t * h * w
        if start < token or end > num_tokens:
            raise ValueError(f"image span {start}:{end} overlaps another one or exceeds the {num_tokens} tokens of the prompt")
        positions[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        positions[:, start:end] = np.indices((t, h, w)).reshape(3, -1) + position
        position += max(h, w)
        token = end
    positions[:, token:] = np.arange(position, position + num_tokens - token)
    next_position = int(positions.max()) + 1 if num_tokens else 0  # many frame pairs: the largest is on the time axis
    return positions, next_position - num_tokens
