"""Qwen3-VL: a decoder whose image tokens are embeddings of a vision tower."""

from collections.abc import Iterator

import torch
from torch import nn

from models.config.types import ModelConfig
from models.decoders.causal_lm import CausalLM
from models.kernels.backend import Backend
from models.layers.linear import Setup
from models.parallel.group import TensorParallel
from models.vision.encoder import Tower, make_tower


class Qwen3VL(CausalLM):
    """See `LanguageModel`. The configuration selects experts or SwiGLU."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__(config, tp, backend, dtype)
        setup = Setup.on(backend, tp, dtype)
        self.visual = make_tower(config, backend, setup)
        self.tower = Tower(config, backend, setup, self.visual)

    def checkpoint_modules(self) -> Iterator[tuple[nn.Module, str]]:
        yield self.visual, "model.visual"
        yield from super().checkpoint_modules()
