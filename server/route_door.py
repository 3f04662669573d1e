"""What the proxy's clients may hold before a request of theirs is there: heads are bounded in time, connections in number.

    idle ──first byte──▶ head ──all of it──▶ at work ──answered──▶ idle       idle ends after a while, see `make_runner`

Used by `server/route.py`. How long a head may be is aiohttp's business; how bodies come, the replicas'.
"""

import asyncio
import contextlib
import resource
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from engine.messages import ErrorInfo
from server.errors import error_body, overloaded

HEADER_SECONDS = 20
MIN_WAIT_SECONDS = 1  # a request may be here that nobody has read yet
NUM_RESERVED = 64  # connections beyond the limit, for health alone
NUM_OTHER_FILES = 64  # of this process
FILES_PER_CLIENT = 2  # its connection, and one to a replica
HEALTH = "/health"
FULL = overloaded("The proxy has as many connections as it can hold.", retry_after=5).info


class Door:
    """How many connections there may be, and who must go for a new one: of those without a request, who has waited longest."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.num_open = 0
        self.waiting: OrderedDict[Connection, float] = OrderedDict()  # since when

    @classmethod
    def for_open_files(cls) -> "Door":
        """As many as this process may open files for."""
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(max(1, (num_files - NUM_OTHER_FILES - NUM_RESERVED) // FILES_PER_CLIENT))

    def admit(self) -> bool:
        """Makes room for a new one. False if all others are at work."""
        if self.num_open <= self.max_connections:
            return True
        longest = next(iter(self.waiting), None)
        if longest is None or time.monotonic() - self.waiting[longest] < MIN_WAIT_SECONDS:
            return False
        del self.waiting[longest]
        longest.abort()
        return True

    def wait(self, connection: "Connection") -> None:
        """It has no request, and makes room if it must."""
        if not connection.is_reserve:
            self.waiting[connection] = time.monotonic()


class Connection(asyncio.Protocol):
    """One client's, before aiohttp's own protocol."""

    def __init__(self, door: Door, http: asyncio.Protocol) -> None:
        self.is_reserve = False  # one of those beyond the limit
        self._door = door
        self._http = http
        self._is_at_work = False
        self._timer: asyncio.TimerHandle | None = None  # of the head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._door.num_open += 1
        self.is_reserve = not self._door.admit()
        self._http.connection_made(transport)
        if self._door.num_open > self._door.max_connections + NUM_RESERVED:
            self.abort()
        self._door.wait(self)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.num_open -= 1
        self._door.waiting.pop(self, None)
        self._stop_timer()
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_at_work and self._timer is None:
            self._start_timer()
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def abort(self) -> None:
        self._transport.abort()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """From the end of a head to the end of the answer."""
        self._is_at_work = True
        self._door.waiting.pop(self, None)
        self._stop_timer()
        try:
            yield
        finally:
            self._is_at_work = False
            if not self._transport.is_closing():
                self._door.wait(self)

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEADER_SECONDS, self.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@web.middleware
async def through_door(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Requests of a connection that has a door, which others have not; one of the reserve gets no more than the state of health."""
    connection = None if request.transport is None else request.transport.get_protocol()
    if not isinstance(connection, Connection):
        return await handler(request)
    with connection.at_work():
        if not connection.is_reserve:
            return await handler(request)
        response = await handler(request) if request.path == HEALTH else error_response(FULL)
        response.force_close()
        return response


def error_response(info: ErrorInfo) -> web.Response:
    """An error before the headers are out."""
    headers = {"Retry-After": str(info.retry_after)} if info.retry_after else None
    return web.Response(body=error_body(info), status=info.status, headers=headers, content_type="application/json")
