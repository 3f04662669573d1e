"""Qwen3-VL: a vision tower whose embeddings join a decoder's tokens."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from models.attention.paged import AttentionBackend
from models.backends.backend import Backend
from models.batch import ForwardBatch, HeadTokens
from models.cache import CacheSpec
from models.config import ModelConfig
from models.geometry import Grid
from models.layers.checkpoint import CheckpointPart, module_tensors
from models.layers.decoder import LayerContext
from models.layers.head import PredictionHead
from models.layers.linear import Setup, VocabParallelEmbedding
from models.parallel import TensorParallel
from models.text import MakeLayer, TextModel, attention_layer
from models.vision.graphs import TowerGraphs
from models.vision.preprocess import Preprocessor
from models.vision.split import SplitAttention
from models.vision.tower import VisionTower


class Qwen3VL(nn.Module):
    """See `VisionLanguageModel`. With experts or without, as the configuration says; or with the layers of another decoder."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        backend: Backend,
        dtype: torch.dtype,
        make_layer: MakeLayer = attention_layer,
        norm_offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.dtype = dtype
        self.device = device = backend.device
        self.ops = backend.ops
        setup = Setup(tp, self.ops, dtype, device)
        heads, head_dim = config.vision.num_heads, config.vision.head_dim
        attention = backend.varlen_attention(heads, head_dim)
        if tp.size > 1 and heads % tp.size == 0:
            attention = SplitAttention(attention, backend.varlen_attention(heads // tp.size, head_dim), tp, config.vision.merge_size**2)
        self.preprocessor = Preprocessor(config.geometry, self.ops, device)
        self.visual = VisionTower(config.vision, attention, setup)
        self._graphs = TowerGraphs(self.visual) if backend.captures_graphs else None
        self.language_model = TextModel(config, setup, make_layer, norm_offset)
        self.mtp = PredictionHead(config.text, setup, make_layer, norm_offset) if config.text.has_head else None
        if config.tie_word_embeddings:
            self.lm_head = self.language_model.embed_tokens
        else:
            self.lm_head = VocabParallelEmbedding(config.text.vocab_size, config.text.hidden_size, setup)

    @property
    def cache_spec(self) -> CacheSpec:
        return self.config.text.cache_spec(self.tp.size, self.dtype.itemsize)

    def encode(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        if not images:
            return []
        run_tower = self.visual if self._graphs is None else self._graphs
        levels: torch.Tensor = run_tower(self._patches(images, grids), grids)
        if len(images) == 1:
            return [levels]
        parts = levels.split([self.config.geometry.num_tokens(grid) for grid in grids], dim=1)
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]

    def encode_part(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
        return self.visual.part(self._patches(images, grids), grids)

    def part_bytes(self, grids: Sequence[Grid]) -> int:
        return self.visual.part_bytes(sum(t * h * w for t, h, w in grids), self.tp.size)

    def quantize_(self) -> None:
        self.language_model.quantize_()
        if self.mtp is not None:
            self.mtp.quantize_()

    def kept_bytes(self) -> int:
        graphs = 0 if self._graphs is None else self._graphs.max_bytes()
        return self.visual.max_table_bytes() + graphs

    def prepare(self, is_busy: bool = False) -> bool:
        return self._graphs is not None and self._graphs.capture_one(is_busy)

    def _patches(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
        """(F, P, X): of images one frame, of pairs two."""
        frames = [image if image.ndim == 4 else image[None] for image in images]
        patches_FPX = self.visual.empty_patches(grids, len(frames[0]))
        parts = patches_FPX.split([t * h * w for t, h, w in grids], dim=1)
        for frames_FHWC, grid, out_FPX in zip(frames, grids, parts, strict=True):
            for frame_HWC, out_PX in zip(frames_FHWC, out_FPX, strict=True):
                self.preprocessor.write_patches(frame_HWC, grid, out_PX)
        return patches_FPX

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

    def checkpoint_tensors(self) -> Iterator[CheckpointPart]:
        yield from module_tensors(self.visual, "model.visual")
        yield from module_tensors(self.language_model, "model.language_model")
        if self.mtp is not None:
            yield from module_tensors(self.mtp, "mtp")
        if not self.config.tie_word_embeddings:
            yield from module_tensors(self.lm_head, "lm_head")
