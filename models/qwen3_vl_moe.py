"""Qwen3-VL with experts: as `models.qwen3_vl`, but every layer of the decoder chooses some of many small SwiGLUs for each token."""

from typing import ClassVar

from models.layers.decoder import FeedForward
from models.layers.moe import SparseMoe
from models.qwen3_vl import Qwen3VL


class Qwen3VLMoe(Qwen3VL):
    """See `Qwen3VL`."""

    feed_forward: ClassVar[FeedForward] = SparseMoe
