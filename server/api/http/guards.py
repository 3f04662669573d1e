"""ASGI middleware that rejects forbidden clients and bodies."""

import hmac
from collections.abc import Callable

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.wire.messages import ErrorInfo
from server.errors import error_body

ERROR_BODIES: dict[str, Callable[[ErrorInfo], bytes]] = {}  # by prefix of paths whose errors are not in OpenAI's form
OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/ping"})


def is_open(scope: Scope) -> bool:
    return get_route_path(scope) in OPEN_PATHS


def address_of(scope: Scope) -> str:
    return str((scope.get("client") or ("",))[0])


def credentials_of(scope: Scope) -> bytes:
    """Return the client's keys, in whichever header they are."""
    values = (value for name, value in scope["headers"] if name in (b"authorization", b"x-api-key"))
    return b"\0".join(value[7:] if value[:7].lower() == b"bearer " else value for value in values)


def error_response(info: ErrorInfo, scope: Scope) -> Response:
    """Return an error before the headers are sent, in the dialect of the path."""
    headers = {} if info.retry_after is None else {"Retry-After": str(info.retry_after)}
    bodies = (body for beginning, body in ERROR_BODIES.items() if get_route_path(scope).startswith(beginning))
    return Response(next(bodies, error_body)(info), info.status, headers, "application/json")


def is_authorised(scope: Scope, keys: list[bytes]) -> bool:
    headers = dict(reversed(scope["headers"]))  # the first of equal headers counts
    bearer = headers.get(b"authorization", b"")
    words = bearer[:7].lower() + bearer[7:], headers.get(b"x-api-key", b"")
    pairs = zip(words, (b"bearer ", b""), strict=True)
    return any([hmac.compare_digest(word, start + key) for word, start in pairs for key in keys])  # compare all keys, in constant time


class Guard:
    """Middleware that sends the response of `check` to a request, unless it is None."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], Response | None]):
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._check(scope) or self._app)(scope, receive, send)


def check_key(keys: list[bytes], scope: Scope) -> Response | None:
    """Require `Authorization: Bearer <key>` or `x-api-key: <key>`, with one of the keys, for all paths except OPEN_PATHS."""
    if is_open(scope) or is_authorised(scope, keys):
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
