"""Routes with small bodies, such as those of administration. Unlike the body of an `Endpoint`, theirs holds no images."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from server.api.http.guards import owner_of
from server.api.schema.validate import check, read_object
from server.errors import RequestError

Run = Callable[..., Awaitable[Any]]


class Command:
    """ASGI application that calls `run` with the body as its type of `asked`; parameters of the query are members, too. `gives`: type of
    the answer's JSON; `passes_owner`: `run` also gets the client's key, to act on its own requests only."""

    streams: Any = None
    last_data = ""

    def __init__(self, run: Run, gives: Any = None, max_bytes: int = 1 << 20, passes_owner: bool = False):
        self.run, self.gives, self._max_bytes, self._passes_owner = run, gives, max_bytes, passes_owner
        self.takes = get_type_hints(run)["asked"]
        self.__doc__ = run.__doc__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, data = Request(scope, receive), bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self._max_bytes:
                raise RequestError(413, f"The body is larger than {self._max_bytes >> 20} MiB: send several requests.")
        value = dict(request.query_params) | (await asyncio.to_thread(read_object, bytes(data)) if data.strip() else {})
        answer = await self.run(check(self.takes, value), *((owner_of(scope),) if self._passes_owner else ()))
        response = answer if isinstance(answer, Response) else JSONResponse(answer)
        await response(scope, receive, send)
