"""Modes of --draft."""

from typing import Annotated, Literal, NamedTuple

from engine.wire.messages import MAX_PROPOSED

MAX_HEAD_DRAFTS = 3  # draft tokens of a model's head per row

Name = Annotated[
    Literal["off", "lookup", "mtp"],
    "speculative decoding: 'lookup' proposes what followed the same context earlier in the request or in"
    " its field `prediction` (also accepted: suffix); 'mtp' uses the model's own prediction head (Qwen3.5 and later)",
]


class Mode(NamedTuple):
    """What a mode needs."""

    max_tokens: int = 0  # per row and step
    reads_head: bool = False
    reads_predictions: bool = False


MODES = {"off": Mode(), "lookup": Mode(MAX_PROPOSED, reads_predictions=True), "mtp": Mode(MAX_HEAD_DRAFTS, reads_head=True)}
