"""Asks a process to render the chat templates of requests. Clients take turns; what a template does there is its own request's error."""

import contextlib

import msgspec

from engine.helper import WALL_S, Helper, HelperDied, Turns
from engine.params import ChatPrompt
from server.errors import RequestError
from server.processor.renderer import Answer, interrupted
from server.processor.template import Rendered, Setting

GRACE_S = 10.0  # for a process that ends its child in time


class RequestTemplates:
    def __init__(self, setting: Setting):
        self._helper = Helper("server.processor.renderer", msgspec.json.encode(setting).decode())
        self._turns = Turns()

    async def start(self) -> None:
        """Takes a second, which the first request would wait."""
        async with self._turns.take(b"", 0):
            with contextlib.suppress(RuntimeError):  # it is closed meanwhile, or the first request tells its client
                await self._helper.start()

    async def close(self) -> None:
        await self._helper.close()

    async def render(self, prompt: ChatPrompt, client: bytes) -> Rendered:
        """By the template in it. RequestError 400 or 503, or RuntimeError if the process does not start."""
        question = msgspec.msgpack.encode(prompt)
        async with self._turns.take(client, len(question)):
            try:
                answer = msgspec.msgpack.decode(await self._helper.ask(question, WALL_S + GRACE_S), type=Answer)
            except (TimeoutError, HelperDied):
                raise interrupted() from None
        if answer.error is not None:
            raise RequestError.of(answer.error)
        assert answer.rendered is not None
        return answer.rendered
