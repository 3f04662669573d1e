"""Sends a request body of many megabytes without copying it.

    object ──encode_into──▶ a buffer that is kept ──pieces of it──▶ the kernel

This avoids a fresh buffer for every body, whose pages the kernel maps one by one, and a copy in which aiohttp joins headers and body.
"""

import time
from typing import Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter

PIECE_BYTES = 1 << 18  # the first one is joined with the headers, which copies it


class Upload(aiohttp.Payload):
    """A serialised body; the buffer must stay as it is until it is written."""

    def __init__(self, buffer: bytearray):
        super().__init__(buffer, content_type="application/json")
        self._size = len(buffer)
        self.buffer = buffer
        self.written = 0.0  # clock reading when the last byte was with the kernel; nobody reads the buffer after that

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Passes the pieces to the transport, each after the kernel has taken the previous one."""
        if writer.transport is not None:  # None: the connection is lost, which `write` reports
            writer.transport.set_write_buffer_limits(1)  # `drain` then waits for the kernel (with 0, uvloop's TLS would wait for ever)
        body = memoryview(self.buffer)
        for start in range(0, len(body), PIECE_BYTES):
            await writer.write(body[start : start + PIECE_BYTES])
        await writer.drain()
        self.written = time.perf_counter()

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.buffer.decode(encoding, errors)


class Uploads:
    """Buffers that are not in use: as many as the most requests at once."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._greatest = 0
        self._encoder = msgspec.json.Encoder()

    def encode(self, body: dict[str, Any]) -> Upload:
        """The body as JSON, in a buffer of its own until `give_back`."""
        buffer = self._free.pop() if self._free else bytearray()
        self._encoder.encode_into(body, buffer)
        return Upload(buffer)

    def give_back(self, upload: Upload) -> None:
        """Its buffer may be used again, unless the server answered before it had read everything: then the transport may still hold it.

        The encoder cuts a buffer to the body's length. It gets the greatest length back, lest it be moved when it grows again.
        """
        if upload.written:
            self._greatest = max(self._greatest, len(upload.buffer))
            upload.buffer.extend(bytes(self._greatest - len(upload.buffer)))
            self._free.append(upload.buffer)
