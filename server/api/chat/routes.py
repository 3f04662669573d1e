"""Routes that FastAPI describes in `/openapi.json`, and commands: routes with small bodies without media."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

from fastapi import Security
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from fastapi.utils import create_model_field
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from server.api.http.guards import OPEN_PATHS
from server.api.schema.validate import check, read_object
from server.errors import RequestError

Run = Callable[..., Awaitable[Any]]
KEYS = [Security(HTTPBearer(auto_error=False)), Security(APIKeyHeader(name="x-api-key", auto_error=False))]


class ErrorMembers(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    error: ErrorMembers


class DescribedRoute(APIRoute):
    """Route whose errors and API keys are described. The answer's JSON has the type that `endpoint` returns, or `response_model`."""

    def __init__(self, path: str, endpoint: Any, method: str = "GET", **others: Any):
        responses = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}, **others.pop("responses", {})}
        name = re.sub(r"(:path)?\W+", "_", path).strip("_") or "page"
        keys = [] if path in OPEN_PATHS else KEYS
        summary = (endpoint.__doc__ or "").partition("\n")[0].strip()
        super().__init__(
            path, endpoint, methods=[method], operation_id=f"{method.lower()}_{name}", dependencies=keys,
            summary=summary, responses=responses, openapi_extra={"security": [{}]} if keys else None, **others,
        )  # fmt: skip
        self._allowed = {method, "HEAD"} if method == "GET" else {method}  # the document would also list every HEAD

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in self._allowed:
            raise HTTPException(405, headers={"Allow": ", ".join(self._allowed)})
        await self.app(scope, receive, send)


class BodyRoute(DescribedRoute):
    """A route to an `Endpoint` or a `Command`, which reads its body itself: FastAPI has the types for the document only."""

    def __init__(self, path: str, app: Any, **others: Any):
        async def endpoint(body: Any) -> None: ...

        endpoint.__annotations__ = {"body": app.takes}
        endpoint.__doc__ = app.__doc__
        responses: dict[int | str, Any] = {}
        if app.streams is not None:
            reference = {"$ref": f"#/components/schemas/{app.streams.__name__}"}
            data: Any = {"type": "string", "contentMediaType": "application/json", "contentSchema": reference}
            data = {"anyOf": [data, {"const": app.last_data}]} if app.last_data else data
            event = {"type": "object", "properties": {"data": data, "event": {"type": "string"}}, "required": ["data"]}
            description = "A document; with `stream: true`, events, each of this schema"
            responses[200] = {"description": description, "content": {"text/event-stream": {"schema": event}}}
        super().__init__(path, endpoint, "POST", response_model=app.gives, responses=responses, **others)
        if app.streams is not None:
            self.response_fields["stream"] = create_model_field("stream", app.streams, mode="serialization")  # for `reference`
        self.app = app


class Command:
    """ASGI application that calls `run` with the body as its type of `asked`; parameters of the query are members, too. `gives`: type of
    the answer's JSON."""

    streams: Any = None
    last_data = ""

    def __init__(self, run: Run, gives: Any = None, max_bytes: int = 1 << 20):
        self.run, self.gives, self._max_bytes = run, gives, max_bytes
        self.takes = get_type_hints(run)["asked"]
        self.__doc__ = run.__doc__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, data = Request(scope, receive), bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self._max_bytes:
                raise RequestError(413, f"The body is larger than {self._max_bytes >> 20} MiB: send several requests.")
        value = dict(request.query_params) | (await asyncio.to_thread(read_object, bytes(data)) if data.strip() else {})
        answer = await self.run(check(self.takes, value))
        response = answer if isinstance(answer, Response) else JSONResponse(answer)
        await response(scope, receive, send)
