"""`JpegDecoder` on the GPU with nvImageCodec; pixels are within 1/255 of Pillow's."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Discard what libraries print meanwhile: nvImageCodec reports codecs that no JPEG needs."""
    kept, null = [os.dup(file) for file in (1, 2)], os.open(os.devnull, os.O_WRONLY)
    try:
        for file in (1, 2):
            os.dup2(null, file)
        yield
    finally:
        for file, own in zip((1, 2), kept, strict=True):
            os.dup2(own, file)
        for own in (*kept, null):
            os.close(own)


class NvImageCodecDecoder:
    """See `JpegDecoder`. Works on the caller's current stream."""

    def __init__(self, num_threads: int, device: torch.device) -> None:
        with without_output():
            from nvidia import nvimgcodec  # an optional dependency

            self._decoder = nvimgcodec.Decoder(device_id=device.index, max_num_cpu_threads=num_threads)
        self._make_stream = nvimgcodec.CodeStream
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)

    def decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        if not payloads:
            return []
        try:
            return self._decode(payloads)
        except RuntimeError:  # a header that only nvImageCodec rejects fails its whole batch
            return [None] if len(payloads) == 1 else [self.decode([payload])[0] for payload in payloads]

    def _decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        stream = torch.cuda.current_stream().cuda_stream
        streams = [self._make_stream(np.frombuffer(payload, dtype=np.uint8)) for payload in payloads]
        images = self._decoder.decode(streams, params=self._params, cuda_stream=stream)
        return [None if image is None else torch.from_dlpack(image.to_dlpack(stream)) for image in images]
