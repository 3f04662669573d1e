"""ASGI middleware: rejection of forbidden clients and bodies, request ids, the access log; and errors before the headers."""

import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.wire.messages import ErrorInfo
from server.errors import error_body

logger = logging.getLogger(__name__)

ERROR_BODIES: dict[str, Callable[[ErrorInfo], bytes]] = {}  # by prefix of paths whose errors are not in OpenAI's form
OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/ping"})
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
HEADER = "x-request-id"
KEY = "engine.record"
POLLS = frozenset({"/health", "/health/live", "/health_generate", "/ping", "/metrics"})  # logged at DEBUG


def is_open(scope: Scope) -> bool:
    return get_route_path(scope) in OPEN_PATHS


def address_of(scope: Scope) -> str:
    return str((scope.get("client") or ("",))[0])


def keys_of(scope: Scope) -> list[bytes]:
    """Return the client's keys, in whichever header they are."""
    values = (value for name, value in scope["headers"] if name in (b"authorization", b"x-api-key"))
    return [value[7:] if value[:7].lower() == b"bearer " else value for value in values]


def error_response(info: ErrorInfo, scope: Scope) -> Response:
    """Return an error before the headers are sent, in the dialect of the path."""
    headers = {} if info.retry_after is None else {"Retry-After": str(info.retry_after)}
    bodies = (body for beginning, body in ERROR_BODIES.items() if get_route_path(scope).startswith(beginning))
    return Response(next(bodies, error_body)(info), info.status, headers, "application/json")


class Guard:
    """Middleware that sends the response of `check` to a request, unless it is None."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], Response | None]):
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._check(scope) or self._app)(scope, receive, send)


def check_key(keys: list[bytes], scope: Scope) -> Response | None:
    """Require `Authorization: Bearer <key>` or `x-api-key: <key>`, with one of the keys, for all paths except OPEN_PATHS."""
    matches = [hmac.compare_digest(given, key) for given in keys_of(scope) for key in keys]  # all of them, each in constant time
    if is_open(scope) or any(matches):
        return None
    response = error_response(ErrorInfo(401, "A valid API key is required.", code="invalid_api_key"), scope)
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def check_type(scope: Scope) -> Response | None:
    """Require a body to be declared as JSON: a web page cannot send this without a CORS preflight. A request without a body needs no
    Content-Type unless a web page sends it."""
    headers = Headers(scope=scope)
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    if scope["method"] != "POST" or not (has_body or "content-type" in headers or "origin" in headers):
        return None
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    words = "The Content-Type of a request must be application/json."
    return error_response(ErrorInfo(415, words, code="unsupported_media_type"), scope)


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
