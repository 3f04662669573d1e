"""ASGI middleware that decides who gets in and with what. Put around the routes by `app.py`."""

import hmac

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.messages import ErrorInfo
from server.errors import error_type
from server.http.reply import error_response

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/ping"})


def is_open(scope: Scope) -> bool:
    """Whether anybody may ask for this path, at any time; decided on the path that will be routed."""
    return get_route_path(scope) in OPEN_PATHS


class ApiKeyGuard:
    """Everything but OPEN_PATHS needs `Authorization: Bearer <key>` or `x-api-key: <key>`."""

    def __init__(self, app: ASGIApp, api_key: str):
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope) and not self._is_authorised(scope):
            error = ErrorInfo(401, "A valid API key is required.", error_type(401), code="invalid_api_key")
            await error_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_authorised(self, scope: Scope) -> bool:
        headers = dict(reversed(scope["headers"]))  # of several, the first one counts
        bearer = headers.get(b"authorization", b"")
        is_bearer = hmac.compare_digest(bearer[:7].lower() + bearer[7:], b"bearer " + self._key)
        return hmac.compare_digest(headers.get(b"x-api-key", b""), self._key) or is_bearer


class JsonGuard:
    """A body is JSON and says so, uncompressed. What a web page may send without asking first never gets in."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._find_problem(Headers(scope=scope)) if scope["type"] == "http" and scope["method"] == "POST" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            error = ErrorInfo(415, problem, error_type(415), code="unsupported_media_type")
            await error_response(error, scope)(scope, receive, send)

    @staticmethod
    def _find_problem(headers: Headers) -> str | None:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            return "The Content-Type of a request must be application/json."
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            return "The Content-Encoding of a request must be identity: compressed bodies are not read."
        return None
