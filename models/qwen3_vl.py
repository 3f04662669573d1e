"""Qwen3-VL as the worker runs it: `encode` turns pixels into image embeddings, `forward` turns a step's tokens into logits."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from models.attention.paged import AttentionBackend
from models.backends.ops import make_ops
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.geometry import Grid
from models.layers.checkpoint import CheckpointTensor, module_tensors
from models.layers.parallel import TensorParallel, VocabParallelEmbedding
from models.text import TextModel
from models.vision.graphs import TowerGraphs
from models.vision.preprocess import Preprocessor
from models.vision.tower import VisionTower


class Qwen3VL(nn.Module):
    """This rank's part of the decoder and head, and the whole vision tower. Weights are uninitialised until loaded (`models.weights`)."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.dtype = dtype
        self.device = device
        self.ops = make_ops(device)
        self.preprocessor = Preprocessor(config.geometry, self.ops, device)
        self.visual = VisionTower(config.vision, self.ops, dtype, device)
        self._graphs = TowerGraphs(self.visual) if device.type == "cuda" else None
        self.language_model = TextModel(config, tp, self.ops, dtype, device)
        if config.tie_word_embeddings:
            self.lm_head = self.language_model.embed_tokens
        else:
            self.lm_head = VocabParallelEmbedding(config.text.vocab_size, config.text.hidden_size, tp, dtype, device)

    def encode(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """uint8 images (H, W, 3) on the device -> for each its embeddings (1 + L, N, D), in a storage of its own.

        The images are resized as `config.geometry` says; ValueError for a size that it rejects. All are encoded in one pass, so the
        caller bounds their patches.
        """
        if not images:
            return []
        grids = [self.config.geometry.grid(image.shape[0], image.shape[1]) for image in images]
        run_tower = self.visual if self._graphs is None else self._graphs
        levels: torch.Tensor = run_tower(self._patches(images, grids), grids)
        if len(images) == 1:
            return [levels]
        parts = levels.split([self.config.geometry.num_tokens(grid) for grid in grids], dim=1)
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]

    def quantize_(self) -> None:
        """Makes the decoder's matrices float8; once, before anything is captured."""
        self.language_model.quantize_()

    def prepare(self, is_busy: bool = False) -> bool:
        """Work that pays later, for a time when the host has nothing to launch: False if there is none. Takes a few tens of milliseconds.

        `is_busy`: the device still works, and what follows may have to wait.
        """
        return self._graphs is not None and self._graphs.capture_one(is_busy)

    def _patches(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
        patches_PX = self.visual.empty_patches(grids)
        for image, grid, out_PX in zip(images, grids, patches_PX.split([t * h * w for t, h, w in grids]), strict=True):
            self.preprocessor.write_patches(image, grid, out_PX)
        return patches_PX

    def forward(self, batch: ForwardBatch, attention: AttentionBackend, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        """(S, V) float32 logits of `batch.logits_indices` over the whole vocabulary, on every rank; in `out_SV` if that is given.

        `attention.plan(batch.attention)` has been called. The step's keys and values are in the pools afterwards.
        """
        hidden_SD = self.language_model(batch, attention)
        if len(hidden_SD) == 0:
            return hidden_SD.new_empty((0, self.config.text.vocab_size), dtype=torch.float32)
        if self.tp.size == 1:
            return self.ops.linear_f32(hidden_SD, self.lm_head.weight, out_SV)
        logits_SV = self.tp.all_gather_columns(self.ops.linear_f32(hidden_SD, self.lm_head.weight))
        return logits_SV if out_SV is None else out_SV.copy_(logits_SV)

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """Where each of the checkpoint's tensors goes."""
        yield from module_tensors(self.visual, "model.visual")
        yield from module_tensors(self.language_model, "model.language_model")
        if not self.config.tie_word_embeddings:
            yield from module_tensors(self.lm_head, "lm_head")
