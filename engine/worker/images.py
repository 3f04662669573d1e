"""The worker's side of the image cache: tensors by id. What is encoded and what is evicted comes with the plan.

Every rank encodes its share of a step's images (the tower is data-parallel) and then receives all of them. Used by the runner.
"""

from collections.abc import Sequence

import torch

from engine.messages import Encode
from engine.worker.jpeg import ImageReader
from models.layers.parallel import TensorParallel
from models.qwen3_vl import Qwen3VL


class ImageCache:
    """Embeddings (1 + L, N, D) by image id, on the device."""

    def __init__(self, model: Qwen3VL, reader: ImageReader, tp: TensorParallel):
        self.tensors: dict[int, torch.Tensor] = {}
        self._model = model
        self._reader = reader
        self._tp = tp

    def evict(self, image_ids: Sequence[int]) -> None:
        for image_id in image_ids:
            del self.tensors[image_id]

    def read(self, encodes: Sequence[Encode]) -> list[torch.Tensor | None]:
        """Pixels of this rank's share of the images; None for one that cannot be decoded."""
        return self._reader.read([encode.source for encode in self._share(encodes, self._tp.rank)])

    def encode(self, encodes: Sequence[Encode], pixels: Sequence[torch.Tensor | None]) -> list[int]:
        """Adds the images to the cache. Returns the ids of this rank's failed ones: their embeddings are zeros."""
        share = self._share(encodes, self._tp.rank)
        good = [index for index, image in enumerate(pixels) if image is not None]
        encoded = dict(zip(good, self._model.encode([image for image in pixels if image is not None]), strict=True))
        own = [encoded[i] if i in encoded else self._zeros(self._num_tokens(share[i])) for i in range(len(share))]
        if self._tp.size == 1:
            self.tensors.update((encode.image_id, tensor) for encode, tensor in zip(share, own, strict=True))
        else:
            self._gather(encodes, own)
        return [encode.image_id for index, encode in enumerate(share) if index not in encoded]

    def _gather(self, encodes: Sequence[Encode], own: Sequence[torch.Tensor]) -> None:
        """All ranks' embeddings to all ranks, in one collective over rows (N, 1 + L, D)."""
        shares = [self._share(encodes, rank) for rank in range(self._tp.size)]
        counts = [sum(self._num_tokens(encode) for encode in share) for share in shares]
        blank = self._zeros(0)
        rows = self._tp.all_gather_rows(torch.cat([blank, *own], dim=1).transpose(0, 1), counts)
        start = 0
        for encode in (encode for share in shares for encode in share):
            end = start + self._num_tokens(encode)
            self.tensors[encode.image_id] = rows[start:end].transpose(0, 1).contiguous()  # a view would keep all rows alive
            start = end

    def _share(self, encodes: Sequence[Encode], rank: int) -> list[Encode]:
        """The images that `rank` encodes: largest first, each to the least loaded rank. Every rank computes the same shares."""
        loads = [0] * self._tp.size
        share = []
        for encode in sorted(encodes, key=lambda e: (-self._num_tokens(e), e.image_id)):
            target = loads.index(min(loads))
            loads[target] += self._num_tokens(encode)
            if target == rank:
                share.append(encode)
        return share

    def _zeros(self, num_tokens: int) -> torch.Tensor:
        config = self._model.config
        shape = (config.num_visual_levels, num_tokens, config.text.hidden_size)
        return torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)

    def _num_tokens(self, encode: Encode) -> int:
        return self._model.config.geometry.num_tokens(encode.grid)
