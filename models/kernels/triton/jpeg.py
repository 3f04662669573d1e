"""`JpegDecoder` on the GPU with nvImageCodec; pixels are within 1/255 of Pillow's."""

from collections.abc import Sequence

import numpy as np
import torch


class NvImageCodecDecoder:
    """See `JpegDecoder`. Works on the caller's current stream."""

    def __init__(self, num_threads: int, device: torch.device) -> None:
        from nvidia import nvimgcodec  # an optional dependency

        self._make_stream = nvimgcodec.CodeStream
        self._decoder = nvimgcodec.Decoder(device_id=device.index, max_num_cpu_threads=num_threads)
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)

    def decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        if not payloads:
            return []
        try:
            return self._decode(payloads)
        except RuntimeError:  # a header that only nvImageCodec rejects fails its whole batch
            return [self._one(payload) for payload in payloads]

    def _one(self, payload: memoryview) -> torch.Tensor | None:
        try:
            return self._decode([payload])[0]
        except RuntimeError:
            return None

    def _decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        stream = torch.cuda.current_stream().cuda_stream
        streams = [self._make_stream(np.frombuffer(payload, dtype=np.uint8)) for payload in payloads]
        images = self._decoder.decode(streams, params=self._params, cuda_stream=stream)
        return [None if image is None else torch.from_dlpack(image.to_dlpack(stream)) for image in images]
