"""Limits of a listener: size and time of heads (request line and headers), number of connections, idle time, and stalled reading.

    idle ──first byte──▶ head ──all of it──▶ parser ──▶ application ──▶ answer ──all written──▶ idle
     └─ --idle-timeout    └─ --header-timeout, MAX_HEAD_BYTES             └─ --write-timeout

A head is parsed when it is complete and the previous request is answered. Until then its bytes wait, most of them in the client's kernel.
"""

import asyncio
import functools
import re
import resource
from collections import OrderedDict
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from engine.launch.config import EngineConfig
from engine.wire.messages import ErrorInfo
from server.errors import RequestError, error_body, overloaded
from server.http.chunked import ChunkedDecoder
from server.http.guards import error_response, is_open

MAX_HEAD_BYTES = 1 << 16
MAX_UNSENT_BYTES = 1 << 16  # with more, the application waits; asyncio's default with TLS is eight times as much
NUM_RESERVED = 64  # connections beyond the limit, for /health only
NUM_OTHER_FILES = 256  # file descriptors of the api other than connections
MIN_WAIT_S = 1.0  # before a connection may be closed for a new one: its request may have arrived unread
LINGER_S = 1.0  # a rejected client may still be sending, and must be able to read the error
END_OF_HEAD = re.compile(rb"\n\r?\n")
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
BEGINNINGS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ\r\n")

FULL = overloaded("The server's connection limit is reached.", retry_after=5).info


class ConnectionLimiter:
    """Limit of a listener's connections. Beyond it, a new connection closes the one that has waited longest for its client to send a
    request or to read an answer."""

    def __init__(self, config: EngineConfig, num_other_files: int = NUM_OTHER_FILES, files_per_client: int = 1):
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        possible = (num_files - num_other_files - NUM_RESERVED) // files_per_client
        self.max_connections = max(1, min(config.max_connections, possible))
        self.header_timeout, self.write_timeout = config.header_timeout, config.write_timeout
        self.waiting: OrderedDict[LimitedProtocol, float] = OrderedDict()  # by start of the wait
        self._open: set[LimitedProtocol] = set()

    def admit(self, connection: "LimitedProtocol") -> int:
        """Count a connection, and close another one if there are too many. Return the number of connections beyond the limit."""
        self._open.add(connection)
        excess = len(self._open) - self.max_connections
        longest, since = next(iter(self.waiting.items()), (connection, float("inf")))
        if excess > 0 and connection.loop.time() - since >= MIN_WAIT_S:
            self.forget(longest)
            longest.transport.abort()
            return 0
        return max(0, excess)

    def forget(self, connection: "LimitedProtocol") -> None:
        """Remove a connection that is closed or about to be."""
        self.waiting.pop(connection, None)
        self._open.discard(connection)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with the limits of a listener."""

    def __init__(self, limiter: ConnectionLimiter, **of_uvicorn: Any):
        super().__init__(**of_uvicorn)
        self._limiter = limiter
        self._is_reserve = False  # it is beyond the limit and may only request /health
        self._is_refused = False  # further bytes are discarded
        self._is_between = True  # between requests: the next byte belongs to a head
        self._head = bytearray()
        self._held = bytearray()  # bytes after a request that is being answered
        self._body_left = 0  # bytes of the body that have not arrived, if it has a Content-Length
        self._chunked: ChunkedDecoder | None = None  # decoder of the current body, if chunked
        self._timer: asyncio.TimerHandle | None = None  # timer of the head, or of the close after a rejection
        self._stall: asyncio.TimerHandle | None = None  # timer while the client does not read
        self._num_unsent = 0  # unsent bytes when that timer was started

    # called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        excess = self._limiter.admit(self)
        self._is_reserve = excess > 0
        if self._is_reserve:
            self.app = functools.partial(show_health_only, self.app)
        if excess > NUM_RESERVED:
            transport.abort()
        self._wait_for_client()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall()
        self._limiter.forget(self)
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Return None: the client has disconnected, and the event loop closes the connection."""
        self._start_stall()

    def data_received(self, data: bytes) -> None:
        """Pass whole heads to the parser, one at a time."""
        while data and not self._is_refused and not self.transport.is_closing():
            if not self._is_between:
                data = self._take_body(data)
            elif self._is_answering:
                self._held += data
                if len(self._held) > MAX_HEAD_BYTES:
                    self.flow.pause_reading()
                return
            else:
                data = self._take_head(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_client()
        self._start_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_answering:
            self._limiter.waiting.pop(self, None)
        if not self.transport.is_closing():
            self._stop_stall()

    # called by the parser and the application

    def on_headers_complete(self) -> None:
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            self._refuse(501, "The Transfer-Encoding of a request must be chunked.")
        elif sum(name == b"host" for name, _ in self.headers) > 1:
            self._refuse(400, "The request has several Host headers.")
        if self._is_refused:
            raise httptools.HttpParserError
        self._is_between = False
        self._stop_timer()
        if not self.flow.write_paused:
            self._limiter.waiting.pop(self, None)
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
        if self.cycle.response_complete:  # before the whole body has arrived
            self._stop_timer()
            self._wait_for_client()

    def end_body(self) -> None:
        """Create a new parser for the next request: this body has bypassed the parser."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
        self.on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_stall()
        if self.cycle.more_body:
            self._start_timer()  # bytes of a rejected body, which are discarded
        else:
            self._wait_for_client()
            held, self._held = bytes(self._held), bytearray()
            self.data_received(held)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_stall()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    # private

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _take_head(self, data: bytes) -> bytes:
        """Return the bytes after the head once it is complete. Hide an offer to upgrade, as sent by Java's client: the parser would drop
        the body."""
        if not self._head:
            self._unset_keepalive_if_required()
            self._start_timer()
        known = len(self._head)
        self._head += data[: MAX_HEAD_BYTES + 1]  # not a large body after it
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
        """Pass the body's part of `data` to the parser. Return the rest."""
        if self._chunked is None:
            size = min(self._body_left, len(data))
            self._body_left -= size
            super().data_received(data[:size])
            return data[size:]
        try:
            payload, size = self._chunked.feed(data)
        except RequestError as error:
            self._refuse(error.info.status, error.info.message)
            return b""
        if payload:
            self.on_body(payload)
        if self._chunked.is_complete:
            self.end_body()
        return data[size:]

    def _wait_for_client(self) -> None:
        self._limiter.waiting.pop(self, None)
        self._limiter.waiting[self] = self.loop.time()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._limiter.header_timeout, self._on_late_head)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late_head(self) -> None:
        self._timer = None
        if self._head:
            self._refuse(408, "The request's headers arrived too slowly.")
        else:
            self._close()

    def _start_stall(self) -> None:
        """Close the connection if the client reads nothing for --write-timeout."""
        if self._stall is None:
            self._num_unsent = self.transport.get_write_buffer_size()
            self._stall = self.loop.call_later(self._limiter.write_timeout, self._on_stall)

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _on_stall(self) -> None:
        self._stall = None
        if self.transport.get_write_buffer_size() < self._num_unsent:
            self._start_stall()
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Send an error, unless a response has begun, and stop reading."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._head.clear()
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._is_answering:  # the malformed body belongs to this request
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self._is_answering or not self.cycle.response_started:
            body = error_body(ErrorInfo(status, message))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self._close)  # a close with unread input would reset the connection

    def _close(self) -> None:
        self.transport.close()
        self._start_stall()


async def show_health_only(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Application of connections beyond the limit."""
    await (app if is_open(scope) else error_response(FULL, scope))(scope, receive, send)


async def send_whole(cycle: RequestResponseCycle, app: ASGI3Application, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer HTTP/1.0, which has no chunked encoding: a stream ends with the connection. uvicorn would send chunks."""

    async def send_plain(message: Message) -> None:
        if message["type"] == "http.response.start" and not any(name.lower() == b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and cycle.chunked_encoding is False and not cycle.expected_content_length:
            cycle.expected_content_length = len(message.get("body", b""))  # for a stream: the bytes available now
        await send(message)

    await app(scope, receive, send_plain)  # type: ignore[arg-type]
