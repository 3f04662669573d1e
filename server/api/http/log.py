"""Request ids, and the access log with one line per request."""

import logging
import re
import secrets
import time
from dataclasses import dataclass

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.http.guards import address_of

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
HEADER = "x-request-id"
KEY = "engine.record"
POLLS = frozenset({"/health", "/health/live", "/health_generate", "/ping", "/metrics"})  # logged at DEBUG


@dataclass(slots=True)
class Record:
    request_id: str
    status: int = 0
    reason: str = ""  # error message sent to the client


def record_of(scope: Scope) -> Record:
    record: Record = scope[KEY]
    return record


class RequestLog:
    """Assigns an id to every request (the client's own if it has one), returns it in a header, and logs the line unless `is_silent`."""

    def __init__(self, app: ASGIApp, is_silent: bool):
        self._app = app
        self._is_silent = is_silent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(HEADER, "")
        record = scope[KEY] = Record(given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16))
        started = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = headers["request-id"] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if get_route_path(scope) in POLLS else logging.INFO
            if not self._is_silent and logger.isEnabledFor(level):
                asked, milliseconds = f"{scope['method']} {scope['path'][:200]!r}", 1e3 * (time.monotonic() - started)
                words = f"{record.request_id} {address_of(scope) or '-'} {asked} {record.status or 'left'}, {milliseconds:.0f} ms"
                logger.log(level, "%s", words + f", {record.reason!r}" * bool(record.reason))
