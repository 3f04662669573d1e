"""Image encoder: the vision tower with preprocessing, CUDA graphs, and images that all ranks encode together."""

from collections.abc import Sequence

import torch

from models.config.types import ModelConfig
from models.kernels.backend import Backend
from models.layers.linear import Setup
from models.media.geometry import Grid
from models.vision.graphs import TowerGraphs
from models.vision.preprocess import Preprocessor
from models.vision.tower import VisionTower
from models.vision.ulysses import UlyssesAttention


def make_tower(config: ModelConfig, backend: Backend, setup: Setup) -> VisionTower:
    assert config.vision is not None
    tp, heads, head_dim = setup.tp, config.vision.num_heads, config.vision.head_dim
    attention = backend.varlen_attention(heads, head_dim)
    if tp.size > 1 and heads % tp.size == 0:
        attention = UlyssesAttention(attention, backend.varlen_attention(heads // tp.size, head_dim), tp, config.vision.merge_size**2)
    return VisionTower(config.vision, attention, setup)


class Tower:
    """Vision tower of a model. The caller bounds the number of patches per call; a call has images or frame pairs, not both."""

    def __init__(self, config: ModelConfig, backend: Backend, setup: Setup, visual: VisionTower) -> None:
        self.config, self.dtype, self.device = config, setup.place.dtype, setup.place.device
        self.preprocessor = Preprocessor(config.geometry, setup.ops, self.device)
        self._visual = visual
        self._graphs = TowerGraphs(visual) if backend.captures_graphs else None
        self.uses_graphs = True  # False while the layers use other weights than at capture

    def encode(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Return the embeddings (1 + L, N, D) of each uint8 image (H, W, 3) or frame pair (2, H, W, 3) on the device, resized to its grid
        (t, h, w) in patches. Each result has its own storage."""
        if not images:
            return []
        patches_FPX = self._patches(images, grids)
        levels = replayed = self._graphs.replay(patches_FPX, grids) if self._graphs is not None and self.uses_graphs else None
        if levels is None:
            levels = self._visual(patches_FPX, grids)
        if replayed is None and len(images) == 1:
            return [levels]
        parts = levels.split([self.config.geometry.num_tokens(grid) for grid in grids], dim=1)
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]

    def encode_part(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
        """Encode together with all ranks: return (1 + L, n, D), this rank's tokens of all images by `part_of`."""
        return self._visual.part(self._patches(images, grids), grids)

    def kept_bytes(self) -> int:
        """Return the most device memory that graphs of `prepare` and tables of grids use."""
        return self._visual.max_table_bytes() + (0 if self._graphs is None else self._graphs.max_bytes())

    def prepare(self, is_busy: bool = False) -> bool:
        """Do some tens of milliseconds of work in advance while the host is idle. Return False if there is none. `is_busy`: the device is
        still working."""
        return self._graphs is not None and self._graphs.capture_one(is_busy)

    def finish(self) -> None:
        """Recompute in place what is derived from weights; call after they have changed."""
        self._visual.finish()
        if self._graphs is not None:
            self._graphs.refresh()

    def _patches(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
        """Return the patches (F, P, X): one frame per image, two per pair."""
        frames = [image if image.ndim == 4 else image[None] for image in images]
        patches_FPX = self._visual.empty_patches(grids, len(frames[0]))
        parts = patches_FPX.split([t * h * w for t, h, w in grids], dim=1)
        for frames_FHWC, grid, out_FPX in zip(frames, grids, parts, strict=True):
            for frame_HWC, out_PX in zip(frames_FHWC, out_FPX, strict=True):
                self.preprocessor.write_patches(frame_HWC, grid, out_PX)
        return patches_FPX
