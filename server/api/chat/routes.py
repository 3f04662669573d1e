"""Routes with their description in `/openapi.json`, and commands: routes with small bodies without media."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from server.api.schema.validate import check, read_object
from server.errors import RequestError

Run = Callable[..., Awaitable[Any]]


class DescribedRoute(Route):
    """Route to a function of the path's parameters, whose result is sent as JSON unless it is a Response."""

    takes: Any = None

    def __init__(self, path: str, run: Any, method: str = "GET"):
        async def answer(request: Request) -> Response:
            return _response(await run(**request.path_params))

        super().__init__(path, run if isinstance(self, BodyRoute) else answer, methods=[method])
        self.method, self.summary = method.lower(), (run.__doc__ or "").partition("\n")[0]

    def describe(self, body: Any) -> dict[str, Any]:
        """Return the OpenAPI description; `body` is the schema of the body, if there is one."""
        name = re.sub(r"\W+", "_", self.path_format).strip("_") or "page"
        texts = {"200": "The answer; events with `stream: true`", "4XX": "An error", "5XX": "An error"}
        answers = {status: {"description": text} for status, text in texts.items()}
        shown = {"operationId": f"{self.method}_{name}", "summary": self.summary, "responses": answers}
        if self.param_convertors:
            text = {"in": "path", "required": True, "schema": {"type": "string"}}
            shown["parameters"] = [{"name": parameter, **text} for parameter in self.param_convertors]
        if body is not None:
            shown["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        return shown


class BodyRoute(DescribedRoute):
    """A route to an `Endpoint` or a `Command`, which reads its body itself."""

    def __init__(self, path: str, app: Any):
        super().__init__(path, app, "POST")
        self.takes = app.takes


def describe(routes: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI document of all described routes, with the types that validate bodies."""
    described = [route for route in routes if isinstance(route, DescribedRoute)]
    bodies = [(route.path, "validation", TypeAdapter(route.takes)) for route in described if route.takes is not None]
    schemas, components = TypeAdapter.json_schemas(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for route in described:
        paths.setdefault(route.path_format, {})[route.method] = route.describe(schemas.get((route.path, "validation")))
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components["$defs"]}}


class Command:
    """ASGI application that calls `run` with the body as its type of `asked`."""

    def __init__(self, run: Run, max_bytes: int = 1 << 20):
        self.run, self._max_bytes = run, max_bytes
        self.takes = get_type_hints(run)["asked"]
        self.__doc__ = run.__doc__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, data = Request(scope, receive), bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self._max_bytes:
                raise RequestError(413, f"The body is larger than {self._max_bytes >> 20} MiB: send several requests.")
        value = await asyncio.to_thread(read_object, bytes(data)) if data.strip() else {}
        await _response(await self.run(check(self.takes, value)))(scope, receive, send)


def _response(answer: Any) -> Response:
    return answer if isinstance(answer, Response) else JSONResponse(answer)
