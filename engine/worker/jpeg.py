"""Image bytes in shared memory -> uint8 RGB tensors on the device. Baseline JPEGs arrive encoded, all others as RGB."""

import ctypes
import logging
from collections.abc import Sequence

import numpy as np
import torch

from engine.wire.arena import ArenaView
from engine.wire.jpeg import parse_plain_jpeg
from engine.wire.messages import ImageSource
from models.kernels.jpeg import JpegDecoder

logger = logging.getLogger(__name__)

READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY


class ImageReader:
    """Reader of image sources in the processor's arena; on a GPU it uses its own stream, concurrently with the running step."""

    def __init__(self, arena: ArenaView, decoder: JpegDecoder, device: torch.device):
        self._arena = arena
        self._decoder = decoder
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        address = np.frombuffer(arena.buffer, dtype=np.uint8).ctypes.data
        # torch has no read-only tensors, but nothing writes to this one: the pages are mapped read-only
        self._memory = torch.frombuffer((ctypes.c_uint8 * arena.size).from_address(address), dtype=torch.uint8)
        self._is_pinned = self._stream is not None and pin(self._memory)

    def read_copy(self, source: ImageSource) -> tuple[torch.Tensor, bytes] | None:
        """Return a JPEG's pixels as `read` does, and the copy they are decoded from; the caller keeps both.

        The bytes may belong to another, unchecked upload by now, whose decoding could take any time and memory. So the copy is decoded only
        if it is a plain JPEG of the announced size.
        """
        copy = bytes(self._bytes(source))
        plain = parse_plain_jpeg(memoryview(copy))
        stored = (source.width, source.height) if source.orientation >= 5 else (source.height, source.width)
        if plain is None or (plain.height, plain.width) != stored:
            return None
        (pixels,) = self._on_stream([source], [memoryview(copy)])
        return None if pixels is None else (pixels, copy)

    def read(self, sources: Sequence[ImageSource]) -> list[torch.Tensor | None]:
        """Return upright pixels on the device, uint8 (height, width, 3), of a frame pair (2, height, width, 3); None for each source that
        cannot be decoded: its request fails, not the engine.

        The current stream waits for the pixels. They belong to another stream: the caller keeps them until its own work is done.
        """
        return self._on_stream(sources, [self._bytes(source) for source in sources])

    def _on_stream(self, sources: Sequence[ImageSource], payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        if self._stream is None:
            return self._read(sources, payloads)
        with torch.cuda.stream(self._stream):
            pixels = self._read(sources, payloads)
            if any(source.orientation != 1 for source in sources):
                self._stream.synchronize()  # rotations read the decoder's own memory, which is free again now
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return pixels

    def _read(self, sources: Sequence[ImageSource], payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        assert all(source.encoding != "file" for source in sources), "an image was planned without its pixels"
        pairs = zip(sources, payloads, strict=True)
        decoded = iter(self._decoder.decode([payload for source, payload in pairs if source.encoding == "jpeg"]))
        return [self._checked(next(decoded), source) if source.encoding == "jpeg" else self._rgb(source) for source in sources]

    def _bytes(self, source: ImageSource) -> memoryview:
        return self._arena.view(source.region.offset, source.region.length)

    def _rgb(self, source: ImageSource) -> torch.Tensor:
        flat = self._memory[source.region.offset :][: source.region.length]
        if self._stream is not None and not self._is_pinned:
            flat = flat.pin_memory()
        shape = (source.height, source.width, 3) if source.num_frames == 1 else (source.num_frames, source.height, source.width, 3)
        return flat.view(shape).to(self._device, non_blocking=True)

    @staticmethod
    def _checked(pixels: torch.Tensor | None, source: ImageSource) -> torch.Tensor | None:
        """Return upright pixels; None if their size is not the one that tokens were counted for."""
        if pixels is None:
            return None
        upright = apply_orientation(pixels, source.orientation)
        return upright if upright.shape == (source.height, source.width, 3) else None


def pin(memory_B: torch.Tensor) -> bool:
    """Register mapped memory as read-only, so that copies from it are asynchronous. Return whether the driver supports that."""
    register = ctypes.CDLL("libcuda.so.1").cuMemHostRegister_v2  # an error of the runtime's function would be reported by torch later
    code: int = register(ctypes.c_void_p(memory_B.data_ptr()), ctypes.c_size_t(memory_B.nbytes), READ_ONLY)
    if code:
        logger.info("pixels are copied twice: the driver does not register read-only memory (CUDA error %d)", code)
    return code == 0


def apply_orientation(pixels_HWC: torch.Tensor, orientation: int) -> torch.Tensor:
    """Undo EXIF orientation 1-8, as PIL.ImageOps.exif_transpose does (TIFF 6.0, tag 274)."""
    if orientation in (5, 6, 7, 8):
        pixels_HWC = pixels_HWC.transpose(0, 1)
    flips = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}.get(orientation, ())
    return pixels_HWC.flip(flips).contiguous() if flips else pixels_HWC.contiguous()
