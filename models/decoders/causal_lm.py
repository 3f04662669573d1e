"""Decoder and output head without a vision tower: Llama, Qwen3."""

from collections.abc import Iterator, Set

import torch
from torch import nn

from models.cache.spec import CacheSpec
from models.checkpoint.names import CheckpointPart, module_tensors
from models.config.types import ModelConfig, TextConfig
from models.decoders.batch import ForwardBatch
from models.decoders.head import Eagle3Predictor, Predictor
from models.decoders.text import TextModel
from models.kernels.backend import Backend
from models.kernels.paged import AttentionBackend
from models.kernels.stream import RowClass
from models.layers.decoder import DecoderLayer, SelfAttention
from models.layers.eagle3 import Eagle3Head
from models.layers.head import PredictionHead
from models.layers.linear import Setup, VocabParallelEmbedding
from models.layers.rotary import MRope
from models.parallel.group import TensorParallel
from models.vision.encoder import Tower
from models.weights.matrix import matrices_of


class CausalLM(nn.Module):
    """See `LanguageModel`."""

    norm_offset = 0.0  # see `Setup`

    def __init__(self, config: ModelConfig, tp: TensorParallel, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.tp, self.dtype, self.device = config, tp, dtype, backend.device
        setup = Setup.on(backend, tp, dtype, self.norm_offset)
        self.language_model = TextModel(config, setup, self.make_layer)
        self.head = PredictionHead(config.text, setup, self.make_layer) if config.text.head_path else None
        self.eagle3: Eagle3Head | None = None
        self.lm_head = embedding = self.language_model.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(config.text.vocab_size, config.text.hidden_size, setup)
        self.tower: Tower | None = None
        self.predictor: Predictor | None = None
        if self.head is not None:
            self.predictor = Predictor(self.head, self.language_model.rope, embedding, self.lm_head, tp)
        elif (eagle3 := config.text.eagle3) is not None:
            self.eagle3 = Eagle3Head(eagle3, config.text.vocab_size, Setup.on(backend, tp, dtype))
            self.predictor = Eagle3Predictor(self.eagle3, MRope(eagle3.layer, setup.ops, self.device), embedding, tp)

    @staticmethod
    def make_layer(layer: int, config: TextConfig, setup: Setup) -> DecoderLayer:
        return DecoderLayer(layer, SelfAttention(layer, config, setup), config, setup)

    @property
    def cache_spec(self) -> CacheSpec:
        return self.config.text.cache_spec(self.tp.size, self.dtype.itemsize)

    def finish(self) -> None:
        for _, matrix in matrices_of(self):
            matrix.finish()
        for part in (self.tower, self.predictor):
            if part is not None:
                part.finish()

    def tie_embeddings(self) -> None:
        self.lm_head.weight = self.language_model.embed_tokens.weight

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        hidden_SD: torch.Tensor = self.language_model(batch, attention)
        return hidden_SD

    def logits(self, hidden_SD: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        if len(hidden_SD) == 0:
            return hidden_SD.new_empty((0, self.config.text.vocab_size), dtype=torch.float32)
        rows = RowClass.of(len(hidden_SD))
        if self.tp.size == 1:
            return self.lm_head.output.product_f32(hidden_SD, rows, out_SV)
        logits_SV = self.tp.all_gather_columns(self.lm_head.output.product_f32(hidden_SD, rows))
        return logits_SV if out_SV is None else out_SV.copy_(logits_SV)

    def checkpoint_modules(self) -> Iterator[tuple[nn.Module, str]]:
        yield self.language_model, "model.language_model"
        if self.head is not None:
            yield self.head, self.config.text.head_path
        if self.lm_head.weight is not self.language_model.embed_tokens.weight:
            yield self.lm_head, "lm_head"

    def head_tensors(self, names: Set[str]) -> Iterator[CheckpointPart]:
        return iter(()) if self.eagle3 is None else self.eagle3.tensors(names)

    def checkpoint_tensors(self) -> Iterator[CheckpointPart]:
        for module, path in self.checkpoint_modules():
            yield from module_tensors(module, path)
