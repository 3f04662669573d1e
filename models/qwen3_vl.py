"""Qwen3-VL: a vision tower whose embeddings join a decoder's tokens."""

from collections.abc import Iterator, Sequence

import torch

from models.backends.backend import Backend
from models.causal_lm import CausalLM
from models.config import ModelConfig
from models.geometry import Grid
from models.layers.checkpoint import CheckpointPart, module_tensors
from models.layers.linear import Setup
from models.parallel import TensorParallel
from models.vision.graphs import TowerGraphs
from models.vision.preprocess import Preprocessor
from models.vision.split import SplitAttention
from models.vision.tower import VisionTower


class Qwen3VL(CausalLM):
    """See `VisionLanguageModel`. With experts or without, as the configuration says."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__(config, tp, backend, dtype)
        heads, head_dim = config.vision.num_heads, config.vision.head_dim
        attention = backend.varlen_attention(heads, head_dim)
        if tp.size > 1 and heads % tp.size == 0:
            attention = SplitAttention(attention, backend.varlen_attention(heads // tp.size, head_dim), tp, config.vision.merge_size**2)
        self.preprocessor = Preprocessor(config.geometry, self.ops, self.device)
        self.visual = VisionTower(config.vision, attention, Setup(tp, self.ops, dtype, self.device))
        self._graphs = TowerGraphs(self.visual) if backend.captures_graphs else None

    def encode(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        if not images:
            return []
        patches_FPX = self._patches(images, grids)
        levels = replayed = None if self._graphs is None else self._graphs.replay(patches_FPX, grids)
        if levels is None:
            levels = self.visual(patches_FPX, grids)
        if replayed is None and len(images) == 1:
            return [levels]
        parts = levels.split([self.config.geometry.num_tokens(grid) for grid in grids], dim=1)
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]

    def encode_part(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
        return self.visual.part(self._patches(images, grids), grids)

    def part_bytes(self, grids: Sequence[Grid]) -> int:
        return self.visual.part_bytes(sum(t * h * w for t, h, w in grids), self.tp.size)

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

    def checkpoint_tensors(self) -> Iterator[CheckpointPart]:
        yield from module_tensors(self.visual, "model.visual")
        yield from super().checkpoint_tensors()
