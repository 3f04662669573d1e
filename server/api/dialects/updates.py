"""Weight updates by SGLang's routes: pause, replace weights, continue. Served only with `--enable-weight-updates`."""

import asyncio
from typing import Any, Literal

import msgspec
from pydantic import Field

from engine.wire.child import Child
from engine.wire.ipc import AsyncInbox, Outbox
from engine.wire.updates import (
    FIRST_VERSION,
    UPDATES_INBOX,
    FromFolder,
    FromGroup,
    JoinGroup,
    LeaveGroup,
    Order,
    OrderDone,
    Pause,
    Resume,
)
from server.api.chat.routes import BodyRoute, Command, DescribedRoute, Run
from server.api.http.registry import RequestRegistry
from server.api.schema.validate import Strict, bad_value
from server.errors import RequestError

Json = dict[str, Any]
MAX_BYTES = 64 << 20  # limit of a body, enough for tens of thousands of tensors
POLL_S = 1.0  # interval of checks whether the server stops


class Nothing(Strict):
    """A body whose fields are all ignored."""


class Mode(Strict):
    mode: Literal["abort"] = "abort"


class Options(Strict):
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    load_format: Literal["auto", "safetensors"] | None = None


class Folder(Options):
    model_path: str


class GroupName(Strict):
    group_name: str = "weight_update_group"


class Group(GroupName):
    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)  # rank 0 is the trainer, which listens
    world_size: int = Field(ge=2)
    backend: Literal["nccl", "gloo"] = "nccl"


class Announced(Options, GroupName):
    names: list[str] = Field(min_length=1)
    dtypes: list[str]
    shapes: list[list[int]]


class WeightUpdates:
    """Methods of the routes. Those with a body give an order to the scheduler; the type of `asked` is the body's."""

    def __init__(self, child: Child, registry: RequestRegistry):
        self._run_dir, self._registry = child.run_dir, registry
        self._scheduler: Outbox[Order] = Outbox(child.run_dir, "scheduler")
        self._lock, self._number = asyncio.Lock(), 0
        self._inbox: AsyncInbox[OrderDone] | None = None
        registry.weight_version = FIRST_VERSION

    def routes(self) -> list[DescribedRoute]:
        posts: dict[str, Run] = {
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.load,
            "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.receive,
            "/destroy_weights_update_group": self.leave,
        }
        return [BodyRoute(path, Command(method, MAX_BYTES)) for path, method in posts.items()]

    async def pause(self, asked: Mode) -> Json:
        """End all requests with `finish_reason` `abort`; those that arrive later wait."""
        return await self._give(Order(0, Pause()))

    async def resume(self, asked: Nothing) -> Json:
        """Start requests again."""
        return await self._give(Order(0, Resume()))

    async def load(self, asked: Folder) -> Json:
        """Replace all weights by those of a folder with a checkpoint of the same architecture and formats."""
        return await self._update(FromFolder(asked.model_path), asked)

    async def join(self, asked: Group) -> Json:
        """Join a trainer's process group: its rank 0 listens at the address, worker i becomes rank `rank_offset` + i."""
        return await self._give(Order(0, JoinGroup(**asked.model_dump())))

    async def receive(self, asked: Announced) -> Json:
        """Replace weights by tensors that rank 0 of the group broadcasts, in this order."""
        names, dtypes, shapes = asked.names, asked.dtypes, asked.shapes
        if not len(set(names)) == len(names) == len(dtypes) == len(shapes):
            raise bad_value("names", f"must differ, and be as many as dtypes ({len(dtypes)}) and shapes ({len(shapes)}), got {len(names)}")
        if any(size < 0 for shape in shapes for size in shape):
            raise bad_value("shapes", "must not be negative")
        return await self._update(FromGroup(asked.group_name, names, dtypes, shapes), asked)

    async def leave(self, asked: GroupName) -> Json:
        """Leave a process group."""
        return await self._give(Order(0, LeaveGroup(asked.group_name)))

    async def _update(self, task: FromFolder | FromGroup, asked: Options) -> Json:
        return await self._give(Order(0, task, bool(asked.abort_all_requests), asked.weight_version))

    async def _give(self, order: Order) -> Json:
        """Wait until the order has been executed, after those before it. RequestError 400 with the reason if it was rejected, 503 if the
        server stops."""
        async with self._lock:
            self._registry.health.check()
            self._inbox = self._inbox or AsyncInbox(self._run_dir, UPDATES_INBOX, OrderDone)
            self._number += 1
            self._scheduler.send(msgspec.structs.replace(order, number=self._number))
            done: OrderDone | None = None
            while done is None or done.number != self._number:  # of an order whose client has disconnected
                try:
                    done = await asyncio.wait_for(self._inbox.recv(), POLL_S)
                    self._registry.weight_version = done.version
                except TimeoutError:
                    self._registry.health.check()
        if done.problem is not None:
            raise RequestError(400, done.problem, code="weight_update_refused")
        return {"success": True, "message": f"Done; the weights have the version {done.version}."}


def weight_routes(child: Child, registry: RequestRegistry) -> list[DescribedRoute]:
    """Return all routes; none without the flag."""
    return WeightUpdates(child, registry).routes() if child.config.enable_weight_updates else []
