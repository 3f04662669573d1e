"""Upload of a request body of many megabytes without a copy.

    object ──encode_into──▶ a reused buffer ──pieces of it──▶ the kernel

This avoids a new buffer per body, whose pages the kernel maps one by one, and aiohttp's copy that joins headers and body.
"""

import time
from typing import Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter

PIECE_BYTES = 1 << 18  # the first piece is copied to join it with the headers


class Upload(aiohttp.Payload):
    """Serialised body; the buffer must not change until it is written."""

    def __init__(self, buffer: bytearray):
        super().__init__(buffer, content_type="application/json")
        self._size = len(buffer)
        self.buffer = buffer
        self.written = 0.0  # clock reading when the kernel had the last byte; the buffer is not read after that

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Pass the pieces to the transport, each after the kernel has taken the previous one."""
        if writer.transport is not None:  # None: the connection is lost, as `write` reports
            writer.transport.set_write_buffer_limits(1)  # `drain` then waits for the kernel (with 0, uvloop's TLS would wait forever)
        body = memoryview(self.buffer)
        for start in range(0, len(body), PIECE_BYTES):
            await writer.write(body[start : start + PIECE_BYTES])
        await writer.drain()
        self.written = time.perf_counter()

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.buffer.decode(encoding, errors)


class Uploads:
    """Pool of unused buffers, at most as many as concurrent requests."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._greatest = 0
        self._encoder = msgspec.json.Encoder()

    def encode(self, body: dict[str, Any]) -> Upload:
        """Return the body as JSON in a buffer of its own until `give_back`."""
        buffer = self._free.pop() if self._free else bytearray()
        self._encoder.encode_into(body, buffer)
        return Upload(buffer)

    def give_back(self, upload: Upload) -> None:
        """Return the buffer to the pool, unless the server answered before reading everything: the transport may still use it then.

        The encoder truncates a buffer to the body's length. Restore the greatest length, so that it need not be moved to grow again.
        """
        if upload.written:
            self._greatest = max(self._greatest, len(upload.buffer))
            upload.buffer.extend(bytes(self._greatest - len(upload.buffer)))
            self._free.append(upload.buffer)
