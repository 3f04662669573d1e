"""A decoder and its head, without a tower: Llama, Qwen3. What a model with a tower adds is in a class of its own."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from models.attention.paged import AttentionBackend
from models.backends.backend import Backend
from models.batch import ForwardBatch, HeadTokens
from models.cache import CacheSpec
from models.config import ModelConfig, TextConfig
from models.geometry import Grid
from models.layers.checkpoint import CheckpointPart, module_tensors
from models.layers.decoder import DecoderLayer, LayerContext, SelfAttention
from models.layers.fp8 import BLOCK, BlockScaled
from models.layers.head import PredictionHead
from models.layers.linear import Setup, VocabParallelEmbedding
from models.parallel import TensorParallel
from models.text import TextModel


class CausalLM(nn.Module):
    """See `VisionLanguageModel`: one that sees nothing."""

    norm_offset = 0.0  # see `Setup`

    def __init__(self, config: ModelConfig, tp: TensorParallel, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.dtype = dtype
        self.device = backend.device
        self.ops = backend.ops
        setup = Setup(tp, self.ops, dtype, self.device, self.norm_offset)
        self.language_model = TextModel(config, setup, self.make_layer)
        self.mtp = PredictionHead(config.text, setup, self.make_layer) if config.text.has_head else None
        self.lm_head = self.language_model.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(config.text.vocab_size, config.text.hidden_size, setup)
        self._rounded_head: BlockScaled | None = None

    @staticmethod
    def make_layer(layer: int, config: TextConfig, setup: Setup) -> DecoderLayer:
        return DecoderLayer(SelfAttention(layer, config, setup), config, setup)

    @property
    def cache_spec(self) -> CacheSpec:
        return self.config.text.cache_spec(self.tp.size, self.dtype.itemsize)

    def encode(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        return []

    def encode_part(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
        raise AssertionError("there is no tower")

    def part_bytes(self, grids: Sequence[Grid]) -> int:
        return 0

    def quantize_(self) -> None:
        self.language_model.quantize_()
        if self.mtp is not None:
            self.mtp.quantize_()

    def round_guesses(self) -> None:
        matrix_VD = self.lm_head.weight
        if not any(size % BLOCK for size in matrix_VD.shape):
            self._rounded_head = BlockScaled.quantized(matrix_VD)

    def kept_bytes(self) -> int:
        return 0

    def prepare(self, is_busy: bool = False) -> bool:
        return False

    def tie_embeddings(self) -> None:
        self.lm_head = self.language_model.embed_tokens

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        hidden_TD: torch.Tensor = self.language_model.embed_tokens(ids_T)
        return hidden_TD

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        hidden_SD: torch.Tensor = self.language_model(batch, attention)
        return hidden_SD

    def predict(
        self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor, places: HeadTokens, attention: AttentionBackend, wanted_S: torch.Tensor
    ) -> torch.Tensor:
        assert self.mtp is not None
        context = LayerContext(attention, None, self.language_model.rope.rows(places.positions_3T), places.slots_T, None)
        hidden_SD: torch.Tensor = self.mtp(embedded_TD, hidden_TD, context, wanted_S)
        return hidden_SD

    def logits(self, hidden_SD: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        if len(hidden_SD) == 0:
            return hidden_SD.new_empty((0, self.config.text.vocab_size), dtype=torch.float32)
        if self.tp.size == 1:
            return self.ops.linear_f32(hidden_SD, self.lm_head.weight, out_SV)
        logits_SV = self.tp.all_gather_columns(self.ops.linear_f32(hidden_SD, self.lm_head.weight))
        return logits_SV if out_SV is None else out_SV.copy_(logits_SV)

    def guesses(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        matrix_VD = self.lm_head.weight if self._rounded_head is None else self._rounded_head
        return self.tp.all_gather_columns(self.ops.linear_f32(hidden_SD, matrix_VD)).argmax(dim=-1)

    def checkpoint_tensors(self) -> Iterator[CheckpointPart]:
        yield from module_tensors(self.language_model, "model.language_model")
        if self.mtp is not None:
            yield from module_tensors(self.mtp, "mtp")
        if self.lm_head is not self.language_model.embed_tokens:
            yield from module_tensors(self.lm_head, "lm_head")
