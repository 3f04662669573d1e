"""Direct reads of large request bodies: from the socket into memory of the application, without copies.

    uvicorn:  socket ─▶ buffer ─▶ bytes ─▶ parser ─▶ bytes ─▶ bytearray ─▶ bytes ─▶ application
    here:     socket ─▶ application

A request whose body has a known length has a `DirectReader` as an ASGI extension. When the application has received the bytes
that the parser has read, it may read the rest of the body itself; then uvicorn's protocol continues with a new parser.
"""

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Iterator

from starlette.requests import ClientDisconnect
from starlette.types import Scope

from server.http.connection import LimitedProtocol

EXTENSION = "direct_body"
SCRATCH_BYTES = 1 << 16


class DirectProtocol(LimitedProtocol):
    """uvicorn's HTTP protocol with direct reads of bodies by the application."""

    def on_headers_complete(self) -> None:
        self.scope["extensions"] = {EXTENSION: DirectReader(self)}  # type: ignore[dict-item]
        super().on_headers_complete()


class DirectReader(asyncio.BufferedProtocol):
    """Reader of the rest of one body. From `take_over` to the last byte it is the connection's protocol, and reading is paused between two
    calls of `fill`. If the application stops reading, the rest is discarded, so that the client reads the response."""

    def __init__(self, http: DirectProtocol):
        self._owner = weakref.ref(http)  # weak, as its scope refers to this reader
        self._rest = 0  # remaining bytes of the body
        self._buffer = memoryview(b"")  # their destination
        self._waiter: asyncio.Future[None] | None = None  # future of the application, until the buffer is full
        self._is_discarding = False

    @property
    def _http(self) -> DirectProtocol:
        http = self._owner()
        assert http is not None
        return http

    @property
    def is_ready(self) -> bool:
        """Return whether the application has taken all parsed bytes and more are expected."""
        cycle = self._http.cycle
        return cycle.more_body and not cycle.body and not cycle.disconnected

    @contextlib.contextmanager
    def take_over(self, num_bytes: int) -> Iterator[None]:
        """Let `fill` read the last `num_bytes` of the body within this context. Requires `is_ready`."""
        self._rest = num_bytes
        self._http.flow.pause_reading()
        self._http.transport.set_protocol(self)
        try:
            yield
        finally:
            self._discard_rest()

    async def fill(self, buffer: memoryview, timeout: Callable[[int], float]) -> None:
        """Read until `buffer`, no longer than the rest, is full. Raise ClientDisconnect, or TimeoutError if nothing arrives for
        `timeout(number of its bytes read)` seconds; also what `timeout` raises."""
        self._raise_if_lost()
        self._buffer = buffer
        self._waiter = asyncio.get_running_loop().create_future()
        self._http.flow.resume_reading()
        while not self._waiter.done():
            before = self._rest
            await asyncio.wait((self._waiter,), timeout=timeout(len(buffer) - len(self._buffer)))
            if not self._waiter.done() and self._rest == before:
                raise TimeoutError
        self._raise_if_lost()

    async def drain(self) -> None:
        """Wait while much of the response is unsent."""
        await self._http.flow.drain()

    def abort(self) -> None:
        self._http.cycle.disconnected = True
        self._http.transport.abort()

    # called by the event loop

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: self._rest]

    def buffer_updated(self, nbytes: int) -> None:
        self._rest -= nbytes
        if not self._is_discarding:
            self._buffer = self._buffer[nbytes:]
            if not self._buffer:
                self._http.flow.pause_reading()
                self._wake()
        if not self._rest:
            self._hand_back()

    def eof_received(self) -> None:
        """The body is truncated; `connection_lost` follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)
        self._buffer = memoryview(b"")
        self._wake()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    # private

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _raise_if_lost(self) -> None:
        if self._http.cycle.disconnected:
            raise ClientDisconnect

    def _discard_rest(self) -> None:
        if self._rest and not self._http.cycle.disconnected:
            self._is_discarding = True
            self._buffer = memoryview(bytearray(SCRATCH_BYTES))
            self._http.flow.resume_reading()

    def _hand_back(self) -> None:
        """Keep reading paused until the application requests more or has responded."""
        self._buffer = memoryview(b"")
        self._http.flow.pause_reading()
        self._http.transport.set_protocol(self._http)
        self._http.end_body()
        if self._http.cycle.response_complete:
            self._http.flow.resume_reading()


def direct_reader(scope: Scope) -> DirectReader:
    reader: DirectReader = scope["extensions"][EXTENSION]
    return reader
