"""What a connection may cost before anybody knows who is there: heads are bounded in size and time, connections in number and idle time.

The base of the protocol of `direct.py`. A head is held back until all of it is here, so that nothing of an endless one is parsed or kept:

    idle ──first byte──▶ head ──all of it──▶ parser ──▶ application ──answered──▶ idle
     └─ --idle-timeout    └─ --header-timeout, MAX_HEAD_BYTES
"""

import asyncio
import functools
import re
import resource
import socket
from collections import OrderedDict
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from engine.config import EngineConfig
from engine.messages import ErrorInfo
from server.errors import error_body, error_type, overloaded
from server.http.guards import is_open
from server.http.reply import error_response

MAX_HEAD_BYTES = 1 << 16
NUM_RESERVED = 64  # connections beyond the limit, for health alone
NUM_OTHER_FILES = 256  # of this process: arenas, sockets to the others, modules that are being read
LINGER_S = 1.0  # a refused client may still be sending, and is to read why
PROBE_S, MAX_PROBE_S = 0.05, 5.0
END_OF_HEAD = re.compile(rb"\n\r?\n")
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
BEGINNINGS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ\r\n")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TCP_STATE_CLOSED = 7  # tcpi_state of TCP_INFO

FULL = overloaded("The server has as many connections as it can hold.", retry_after=5).info


class Door:
    """How many connections there may be, and who must go for a new one: of those that wait for their client, who has waited longest."""

    def __init__(self, config: EngineConfig):
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.max_connections = max(1, min(config.max_connections, num_files - NUM_OTHER_FILES - NUM_RESERVED))
        self.header_timeout = config.header_timeout
        self.waiting: OrderedDict[BoundedProtocol, None] = OrderedDict()

    def admit(self, num_connections: int) -> bool:
        """Makes room for the newest of so many connections. False if all others are at work: it gets no more than the state of health."""
        if num_connections <= self.max_connections:
            return True
        if not self.waiting:
            return False
        longest, _ = self.waiting.popitem(last=False)
        longest.transport.close()
        return True


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol behind a door."""

    def __init__(self, door: Door, **of_uvicorn: Any):
        super().__init__(**of_uvicorn)
        self._door = door
        self._is_reserve = False  # one of the connections beyond the limit
        self._is_deaf = False  # what comes is thrown away: the client was refused
        self._is_between = True  # no body is being read: the next byte belongs to a head
        self._head = bytearray()
        self._body_left: int | None = 0  # bytes until the next head; None: it is chunked
        self._tail = b""  # of a chunked body: what may be the beginning of its end
        self._num_idle_bytes = 0  # that the parser took since it last gave anything out
        self._timer: asyncio.TimerHandle | None = None  # of the head

    # ---- called by the event loop ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_connections = len(self.connections)
        self._is_reserve = not self._door.admit(num_connections)
        if self._is_reserve:
            self.app = functools.partial(show_health_only, self.app)
        if num_connections > self._door.max_connections + NUM_RESERVED:
            transport.abort()
        self._wait_for_client()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has sent its request may close its side and wait: it is answered. Whether it is still there shows when it is told
        to continue, which any client may be: one that is gone resets the connection. In the middle of an answer nobody does so."""
        cycle = self.cycle
        is_waiting = cycle is not None and not (cycle.more_body or cycle.response_started)
        if is_waiting:
            cycle.keep_alive = False
            self._probe(PROBE_S)
        return is_waiting

    def data_received(self, data: bytes) -> None:
        """Heads reach the parser whole, bodies as they come."""
        while data and not self._is_deaf and not self.transport.is_closing():
            if self._is_between:
                data = self._take_head(data)
            else:
                size = self._until_possible_end(data) if self._body_left is None else self._body_left
                self._body_left = None if self._body_left is None else self._body_left - len(data[:size])
                self._feed(data[:size])
                data = data[size:]

    # ---- called by the parser --------------------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._is_between = False
        self._tail = b""
        self._num_idle_bytes = 0
        self._stop_waiting()
        headers = dict(self.headers)
        self._body_left = None if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))
        super().on_headers_complete()
        if self._is_reserve:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_between = True
        super().on_message_complete()
        self.cycle.more_body = False
        if self.cycle.response_complete:  # before all of the body was here
            self._stop_waiting()
            self._wait_for_client()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_deaf:
            self._close_soon()
        elif self.cycle.more_body:
            self._start_timer()  # of a refused body, which is thrown away
        elif self.cycle.response_complete:
            self._wait_for_client()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    # ---- private ---------------------------------------------------------------------------------------------------------------------

    def _take_head(self, data: bytes) -> bytes:
        """What lies behind the head, once that is whole. An offer to upgrade, which Java's client makes with every first request, is
        passed over: the parser would drop the body."""
        if not self._head:
            self._unset_keepalive_if_required()
            self._start_timer()
        searched = max(0, len(self._head) - 2)
        known = len(self._head)
        self._head += data[: MAX_HEAD_BYTES + 1]  # what follows is a body, and large
        end = END_OF_HEAD.search(self._head, searched)
        size = end.end() if end else len(self._head)
        if size > MAX_HEAD_BYTES:
            self._refuse(*(431, "The request's headers are too large.") if b"\n" in self._head else (414, "The request's URL is too long."))
            return b""
        if end is None and self._head[0] in BEGINNINGS:
            return b""
        head, rest = bytes(self._head[:size]), data[size - known :]
        self._head.clear()
        self._feed(UPGRADE.sub(b"\r\nx-offer:", head))
        return rest

    def _until_possible_end(self, data: bytes) -> int:
        """Bytes of a chunked body to be parsed at once: it ends like a head, and what follows is to be held back."""
        end = END_OF_HEAD.search(self._tail + data)
        size = len(data) if end is None else end.end() - len(self._tail)
        self._tail = b"" if end else (self._tail + data)[-2:]
        return size

    def _feed(self, data: bytes) -> None:
        """To the parser, which keeps what it does not give out: trailers, extensions of chunks."""
        self._num_idle_bytes += len(data)
        super().data_received(data)
        if self._num_idle_bytes > 2 * MAX_HEAD_BYTES:
            self._refuse(431, "The request's headers are too large.")

    def _wait_for_client(self) -> None:
        self._door.waiting[self] = None
        self._door.waiting.move_to_end(self)

    def _stop_waiting(self) -> None:
        self._door.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._door.header_timeout, self._on_late_head)

    def _on_late_head(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # a later request of a client that still reads its answer
        elif self._head:
            self._refuse(408, "The request's headers came too slowly.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answers, unless another answer is under way, and reads no further request."""
        if self._is_deaf or self.transport.is_closing():
            return
        self._is_deaf = True
        self._head.clear()
        self._stop_waiting()
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.more_body:  # it was its body that was malformed
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            else:
                self.cycle.keep_alive = False
                return
        body = error_body(ErrorInfo(status, message, error_type(status)))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self._close_soon()

    def _close_soon(self) -> None:
        """A connection that is closed on bytes that nobody read is reset, and the client loses its answer."""
        if not self.transport.is_closing():
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)

    def _probe(self, seconds: float) -> None:
        """Ends the request of a half-closed connection if its client is gone; asks again later, less and less often."""
        connection: socket.socket | None = self.transport.get_extra_info("socket")
        if connection is None or self.transport.is_closing() or self.cycle.response_started:
            return
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_STATE_CLOSED:
            self.transport.abort()
            return
        if self.scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)
        self.loop.call_later(seconds, self._probe, min(2 * seconds, MAX_PROBE_S))


async def show_health_only(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """What the connections beyond the limit may ask for."""
    await (app if is_open(scope) else error_response(FULL, scope))(scope, receive, send)
