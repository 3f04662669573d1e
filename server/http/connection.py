"""The limits of a listener: heads in size and time, connections in number, idle time, and time in which a client reads nothing.

    idle ──first byte──▶ head ──all of it──▶ parser ──▶ application ──▶ answer ──all written──▶ idle
     └─ --idle-timeout    └─ --header-timeout, MAX_HEAD_BYTES             └─ --write-timeout

A head is parsed when all of it is here and the request before it is answered: until then its bytes wait, and soon in the client's kernel.
"""

import asyncio
import functools
import re
import resource
import socket
import struct
from collections import Counter, OrderedDict
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from engine.config import EngineConfig
from engine.messages import ErrorInfo
from server.errors import error_body, error_type, overloaded
from server.http.chunked import BadChunk, ChunkedDecoder, LineTooLong
from server.http.guards import error_response, is_open
from server.http.shares import host_of, largest_holders

MAX_HEAD_BYTES = 1 << 16
MAX_UNSENT_BYTES = 1 << 26  # of all answers: beyond it the address with most of them loses its largest
ADDRESS_PART = 3 / 4  # of the connections, for one address
NUM_RESERVED = 64  # connections beyond the limit, for health alone
NUM_OTHER_FILES = 256  # of the api
MIN_WAIT_S = 1.0  # before a connection makes room: its request may be here and not read yet
LOOK_S = 1.0  # between two looks at what clients have read
LINGER_S = 1.0  # a refused client may still be sending, and is to read why
PROBE_S, MAX_PROBE_S = 0.05, 5.0
END_OF_HEAD = re.compile(rb"\n\r?\n")
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
BEGINNINGS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ\r\n")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BYTES_ACKED = struct.Struct("120xQ")  # tcpi_bytes_acked

FULL = overloaded("The server has as many connections as it can hold.", retry_after=5).info


class ConnectionLimiter:
    """How many connections a listener may have. A new one closes the one that waits longest for its client, to send a request or to read an
    answer. An address that has its share makes room itself."""

    def __init__(self, config: EngineConfig, num_other_files: int = NUM_OTHER_FILES, files_per_client: int = 1):
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        possible = (num_files - num_other_files - NUM_RESERVED) // files_per_client
        self.max_connections = max(1, min(config.max_connections, possible))
        self.header_timeout, self.write_timeout = config.header_timeout, config.write_timeout
        self.waiting: OrderedDict[LimitedProtocol, float] = OrderedDict()  # since when
        self._open: set[LimitedProtocol] = set()
        self._num_by_address: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def admit(self, connection: "LimitedProtocol") -> int:
        """Counts a connection and makes room for it. Returns by how many it is too many."""
        address, loop = connection.address, connection.loop
        self._open.add(connection)
        self._num_by_address[address] += 1
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look, loop)
        of_address = self._num_by_address[address] - max(1, int(ADDRESS_PART * self.max_connections))
        excess = max(0, of_address, len(self._open) - self.max_connections)
        return 0 if excess and self._make_room(loop.time(), address if of_address > 0 else None) else excess

    def forget(self, connection: "LimitedProtocol") -> None:
        """It is closed, or will be at once."""
        self.waiting.pop(connection, None)
        if connection in self._open:
            self._open.remove(connection)
            self._num_by_address[connection.address] -= 1
            if not self._num_by_address[connection.address]:
                del self._num_by_address[connection.address]

    def _make_room(self, now: float, address: str | None = None) -> bool:
        for connection, since in self.waiting.items():
            if now - since < MIN_WAIT_S:
                break
            if address in (None, connection.address):
                self.forget(connection)
                connection.transport.abort()
                return True
        return False

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check all connections, now and again after LOOK_S."""
        try:
            self._check_unsent(loop.time())
        finally:
            self._timer = loop.call_later(LOOK_S, self._look, loop) if self._open else None

    def _check_unsent(self, now: float) -> None:
        unsent = {connection: size for connection in tuple(self._open) if (size := connection.look(now))}
        for largest in largest_holders(unsent, lambda one: one.address, MAX_UNSENT_BYTES):
            largest.transport.abort()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol behind a limiter."""

    def __init__(self, limiter: ConnectionLimiter, **of_uvicorn: Any):
        super().__init__(**of_uvicorn)
        self.address = ""
        self._limiter = limiter
        self._is_reserve = False  # beyond the limit
        self._is_deaf = False  # the client was refused: what comes is thrown away
        self._is_between = True  # the next byte belongs to a head
        self._head = bytearray()
        self._held = bytearray()  # what came behind a request that is being answered
        self._body_left = 0  # bytes of the body that have not arrived, if it has a Content-Length
        self._chunked: ChunkedDecoder | None = None  # of the body that arrives, if it is chunked
        self._timer: asyncio.TimerHandle | None = None  # of the head
        self._num_acked, self._acked = -1, 0.0  # bytes that the client's kernel took, -1: all; since when

    # ---- called by the event loop ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = host_of(self.client[0]) if self.client else ""
        excess = self._limiter.admit(self)
        self._is_reserve = excess > 0
        if self._is_reserve:
            self.app = functools.partial(show_health_only, self.app)
        if excess > NUM_RESERVED:
            transport.abort()
        self._wait_for_client()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._limiter.forget(self)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has sent its request may close its side and wait: it is answered. One that is gone resets the connection when it is
        told to continue. In the middle of an answer nobody does so."""
        cycle = self.cycle
        is_waiting = cycle is not None and not (cycle.more_body or cycle.response_started)
        if is_waiting:
            cycle.keep_alive = False
            self._probe(PROBE_S)
        return is_waiting

    def data_received(self, data: bytes) -> None:
        """Heads reach the parser whole and one at a time."""
        while data and not self._is_deaf and not self.transport.is_closing():
            if not self._is_between:
                data = self._take_body(data)
            elif self._is_answering:
                self._held += data
                if len(self._held) > MAX_HEAD_BYTES:
                    self.flow.pause_reading()
                return
            else:
                data = self._take_head(data)

    # ---- called by the parser and the application ------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            self._refuse(501, "The Transfer-Encoding of a request must be chunked.")
        elif sum(name == b"host" for name, _ in self.headers) > 1:
            self._refuse(400, "The request has several Host headers.")
        if self._is_deaf:
            raise httptools.HttpParserError
        self._is_between = False
        self._stop_waiting()
        self._chunked = ChunkedDecoder() if codings else None
        self._body_left = int(dict(self.headers).get(b"content-length", b"0"))
        super().on_headers_complete()
        if self._is_reserve:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        super()._start_asgi_task(cycle, functools.partial(send_whole, cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def on_message_complete(self) -> None:
        self._is_between = True
        super().on_message_complete()
        self.cycle.more_body = False
        if self.cycle.response_complete:  # before all of the body was here
            self._stop_waiting()
            self._wait_for_client()

    def end_body(self) -> None:
        """The body did not pass through the parser: a new parser reads the next request."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body:
            self._start_timer()  # of a refused body, which is thrown away
        else:
            self._wait_for_client()
            held, self._held = bytes(self._held), bytearray()
            self.data_received(held)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    # ---- called by the limiter -------------------------------------------------------------------------------------------------------

    def look(self, now: float) -> int:
        """Bytes that wait to be sent. A client that takes none of them is closed after --write-timeout, or sooner for others."""
        num_unsent: int = self.transport.get_write_buffer_size()
        num_acked = -1
        if num_unsent:
            connection: socket.socket = self.transport.get_extra_info("socket")
            (num_acked,) = BYTES_ACKED.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED.size))
        if num_acked != self._num_acked:
            self._num_acked, self._acked = num_acked, now
            if self._is_answering:
                self._limiter.waiting.pop(self, None)
        elif num_unsent and now - self._acked > self._limiter.write_timeout:
            self.transport.abort()
        elif num_unsent:
            self._limiter.waiting.setdefault(self, self._acked)
        return num_unsent

    # ---- private ---------------------------------------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _take_head(self, data: bytes) -> bytes:
        """What lies behind the head, once that is whole. An offer to upgrade, as Java's client makes, is passed over: the parser would drop
        the body."""
        if not self._head:
            self._unset_keepalive_if_required()
            self._start_timer()
        known = len(self._head)
        self._head += data[: MAX_HEAD_BYTES + 1]  # what follows is a body, and large
        end = END_OF_HEAD.search(self._head, max(0, known - 2))
        size = end.end() if end else len(self._head)
        if size > MAX_HEAD_BYTES:
            self._refuse(*(431, "The request's headers are too large.") if b"\n" in self._head else (414, "The request's URL is too long."))
            return b""
        if end is None and self._head[0] in BEGINNINGS:
            return b""
        head, rest = bytes(self._head[:size]), data[size - known :]
        self._head.clear()
        super().data_received(UPGRADE.sub(b"\r\nx-offer:", head))
        return rest

    def _take_body(self, data: bytes) -> bytes:
        """Pass the body's part of `data` on. Return the rest."""
        if self._chunked is None:
            size = min(self._body_left, len(data))
            self._body_left -= size
            super().data_received(data[:size])
            return data[size:]
        try:
            payload, size = self._chunked.feed(data)
        except LineTooLong:
            self._refuse(431, "The trailers or an extension of a chunk are too large.")
            return b""
        except BadChunk:
            self._refuse(400, "The request's chunks are malformed.")
            return b""
        if payload:
            self.on_body(payload)
        if self._chunked.is_complete:
            self.end_body()
        return data[size:]

    def _wait_for_client(self) -> None:
        self._limiter.waiting.pop(self, None)
        self._limiter.waiting[self] = self.loop.time()

    def _stop_waiting(self) -> None:
        self._limiter.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._limiter.header_timeout, self._on_late_head)

    def _on_late_head(self) -> None:
        self._timer = None
        if self._head:
            self._refuse(408, "The request's headers came too slowly.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answers, unless an answer has begun, and reads no more."""
        if self._is_deaf or self.transport.is_closing():
            return
        self._is_deaf = True
        self._head.clear()
        self._stop_waiting()
        self._unset_keepalive_if_required()
        if self._is_answering:  # it was its body that was malformed
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self._is_answering or not self.cycle.response_started:
            body = error_body(ErrorInfo(status, message, error_type(status)))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self._close_soon()

    def _close_soon(self) -> None:
        """Closed on unread bytes, it would be reset, and the client lose its answer."""
        if not self.transport.is_closing():
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)

    def _probe(self, seconds: float) -> None:
        """A write behind a reset ends the request."""
        if self.scope["http_version"] == "1.1" and not (self.transport.is_closing() or self.cycle.response_started):
            self.transport.write(CONTINUE)
            self.loop.call_later(seconds, self._probe, min(2 * seconds, MAX_PROBE_S))


async def show_health_only(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """What the connections beyond the limit may ask for."""
    await (app if is_open(scope) else error_response(FULL, scope))(scope, receive, send)


async def send_whole(cycle: RequestResponseCycle, app: ASGI3Application, scope: Scope, receive: Receive, send: Send) -> None:
    """For HTTP/1.0, which has no chunks: the end of the connection ends a stream. uvicorn would send chunks."""

    async def send_plain(message: Message) -> None:
        if message["type"] == "http.response.start" and not any(name.lower() == b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and cycle.chunked_encoding is False and not cycle.expected_content_length:
            cycle.expected_content_length = len(message.get("body", b""))  # of a stream: as much as there is
        await send(message)

    await app(scope, receive, send_plain)  # type: ignore[arg-type]
