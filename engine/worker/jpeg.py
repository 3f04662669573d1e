"""Image bytes in shared memory -> uint8 RGB tensors on the device. Used by the worker's image cache; decides nothing.

Baseline JPEGs come encoded, everything else as RGB; plans name no files. A JPEG that cannot be decoded is None: its request fails, not the
engine.
"""

from collections.abc import Sequence

import torch

from engine.arena import ArenaView
from engine.messages import ImageSource
from models.backends.jpeg import JpegDecoder


class ImageReader:
    """Reads image sources out of the processor's arena. On a GPU it works on a stream of its own, beside the step that runs."""

    def __init__(self, arena: ArenaView, decoder: JpegDecoder, device: torch.device):
        self._arena = arena
        self._decoder = decoder
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, sources: Sequence[ImageSource]) -> list[torch.Tensor | None]:
        """uint8 (height, width, 3) on the device, upright; None for each source that cannot be decoded.

        The current stream waits for the pixels. They belong to another stream: the caller keeps them until its own work is done.
        """
        if self._stream is None:
            return self._read(sources)
        with torch.cuda.stream(self._stream):
            pixels = self._read(sources)
            if any(source.orientation != 1 for source in sources):
                self._stream.synchronize()  # what was turned was read from the decoder's own memory, which is free again now
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return pixels

    def _read(self, sources: Sequence[ImageSource]) -> list[torch.Tensor | None]:
        assert all(source.encoding != "file" for source in sources), "an image was planned without its pixels"
        pairs = [(source, self._arena.view(source.region.offset, source.region.length)) for source in sources]
        decoded = iter(self._decoder.decode([payload for source, payload in pairs if source.encoding == "jpeg"]))
        return [
            self._checked(next(decoded), source) if source.encoding == "jpeg" else self._rgb(source, payload) for source, payload in pairs
        ]

    def _rgb(self, source: ImageSource, payload: memoryview) -> torch.Tensor:
        flat = torch.frombuffer(payload, dtype=torch.uint8)
        return flat.view(source.height, source.width, 3).to(self._device, non_blocking=True)

    @staticmethod
    def _checked(pixels: torch.Tensor | None, source: ImageSource) -> torch.Tensor | None:
        """Upright pixels; None if the decoded size is not what the header said when the tokens were counted."""
        if pixels is None:
            return None
        upright = apply_orientation(pixels, source.orientation)
        return upright if upright.shape == (source.height, source.width, 3) else None


def apply_orientation(pixels_HWC: torch.Tensor, orientation: int) -> torch.Tensor:
    """EXIF orientation 1-8 undone, as PIL.ImageOps.exif_transpose does (TIFF 6.0, tag 274)."""
    if orientation in (5, 6, 7, 8):
        pixels_HWC = pixels_HWC.transpose(0, 1)
    flips = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}.get(orientation, ())
    return pixels_HWC.flip(flips).contiguous() if flips else pixels_HWC.contiguous()
