"""Orders for weight updates, from the api to the scheduler."""

import asyncio
import itertools
from collections.abc import Callable

from engine.launch.child import Child
from engine.wire.ipc import AsyncInbox, Outbox
from engine.wire.updates import FIRST_VERSION, UPDATES_INBOX, Order, OrderDone, metadata_of
from server.errors import RequestError
from server.http.client import Client

POLL_S = 1.0  # interval of checks whether the server stops


class Orders:
    """Orders to the scheduler, which answers to a separate inbox."""

    def __init__(self, child: Child, client: Client):
        self._run_dir, self._client, self.num_ranks = child.run_dir, client, child.config.tp
        self._scheduler: Outbox[Order] = Outbox(child.run_dir, "scheduler")
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[OrderDone]] = {}
        self._reader: asyncio.Task[None] | None = None
        self.is_paused = False
        self._rename(FIRST_VERSION)

    async def give(self, order: Callable[[int], Order]) -> OrderDone:
        """Wait until the order has been executed. RequestError 400 with the reason if it was rejected, 503 if the server stops."""
        self._client.health.check()
        self._reader = self._reader or asyncio.create_task(self._read())
        number = next(self._numbers)
        done = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._scheduler.send(order(number))
        while not (await asyncio.wait([done], timeout=POLL_S))[0]:
            if (refusal := self._client.health.refusal) is not None:
                raise RequestError.of(refusal)
        answer = done.result()
        self._rename(answer.version)
        if answer.problem is not None:
            raise RequestError(400, answer.problem, code="weight_update_refused")
        return answer

    def _rename(self, version: str) -> None:
        self.version, self._client.metadata = version, metadata_of(version)

    async def _read(self) -> None:
        inbox: AsyncInbox[OrderDone] = AsyncInbox(self._run_dir, UPDATES_INBOX, OrderDone)
        while True:
            answer = await inbox.recv()
            if not (done := self._waiting.pop(answer.number)).done():  # cancelled
                done.set_result(answer)
