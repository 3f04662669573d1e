"""JPEG decoders that run on the GPU. Imported by `build` only on CUDA machines, where their libraries are installed.

nvImageCodec is the default: its pixels are within 1/255 of Pillow's. torchvision's decoder is kept for comparison: its 4:2:0 chroma is
nearest-neighbour (differences up to 82/255), and one bad file fails its whole batch, which is then decoded one by one.
"""

from collections.abc import Sequence

import numpy as np
import torch
from nvidia import nvimgcodec
from torchvision.io import ImageReadMode, decode_jpeg


class NvImageCodecDecoder:
    """Batches through nvImageCodec, on the caller's current stream."""

    def __init__(self, device: torch.device, num_threads: int):
        self._decoder = nvimgcodec.Decoder(device_id=device.index, max_num_cpu_threads=num_threads)
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)

    def decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        if not payloads:
            return []
        try:
            return self._decode(payloads)
        except RuntimeError:  # a header that only nvImageCodec finds damaged fails its whole batch
            return [self._one(payload) for payload in payloads]

    def _one(self, payload: memoryview) -> torch.Tensor | None:
        try:
            return self._decode([payload])[0]
        except RuntimeError:
            return None

    def _decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        stream = torch.cuda.current_stream().cuda_stream
        streams = [nvimgcodec.CodeStream(np.frombuffer(payload, dtype=np.uint8)) for payload in payloads]
        images = self._decoder.decode(streams, params=self._params, cuda_stream=stream)
        return [None if image is None else torch.from_dlpack(image.to_dlpack(stream)) for image in images]


class TorchvisionDecoder:
    """Batches through torchvision's nvJPEG. It does not wait for the caller's stream, so it is synchronised around."""

    def __init__(self, device: torch.device):
        self._device = device

    def decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        if not payloads:
            return []
        encoded = [torch.frombuffer(payload, dtype=torch.uint8) for payload in payloads]
        try:
            decoded = list(decode_jpeg(encoded, ImageReadMode.RGB, self._device))
        except RuntimeError:
            return [self._one(payload) for payload in encoded]
        torch.cuda.synchronize(self._device)
        return [pixels_CHW.permute(1, 2, 0) for pixels_CHW in decoded]

    def _one(self, payload: torch.Tensor) -> torch.Tensor | None:
        try:
            pixels_CHW: torch.Tensor = decode_jpeg(payload, ImageReadMode.RGB, self._device)
        except RuntimeError:
            return None
        torch.cuda.synchronize(self._device)
        return pixels_CHW.permute(1, 2, 0)
