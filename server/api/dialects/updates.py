"""Weight updates by SGLang's routes: pause, replace weights, continue. Served only with `--enable-weight-updates`."""

import asyncio
import contextlib
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.wire.ipc import AsyncInbox, Outbox
from engine.wire.updates import (
    FIRST_VERSION,
    UPDATES_INBOX,
    FromFolder,
    FromGroup,
    JoinGroup,
    Order,
    OrderDone,
)
from server.api.chat.routes import BodyRoute, Command, DescribedRoute, Run
from server.api.http.registry import RequestRegistry
from server.api.schema.validate import Strict, bad_value
from server.errors import RequestError

Json = dict[str, Any]
MAX_BYTES = 64 << 20  # limit of a body, enough for tens of thousands of tensors
POLL_S = 1.0  # interval of checks whether the server stops


class Mode(Strict):
    mode: Literal["abort"] = "abort"


class Options(Strict):
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    load_format: Literal["auto", "safetensors"] | None = None


class Folder(Options):
    model_path: str


class Group(Strict):
    group_name: str = "weight_update_group"
    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)  # rank 0 is the trainer, which listens
    world_size: int = Field(ge=2)
    backend: Literal["nccl", "gloo"] = "nccl"


class Announced(Options):
    names: list[str] = Field(min_length=1)
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0)]]]


class WeightUpdates:
    """Methods of the routes; the type of `asked` is the body's."""

    def __init__(self, run_dir: str, registry: RequestRegistry):
        self._run_dir, self._registry = run_dir, registry
        self._scheduler: Outbox[Order] = Outbox(run_dir, "scheduler")
        self._lock = asyncio.Lock()
        self._inbox: AsyncInbox[OrderDone] | None = None
        registry.weight_version = FIRST_VERSION

    def routes(self) -> list[DescribedRoute]:
        posts: dict[str, Run] = {
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.load,
            "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.receive,
        }
        return [BodyRoute(path, Command(method, MAX_BYTES)) for path, method in posts.items()]

    async def pause(self, asked: Mode) -> Json:
        """End all requests with `finish_reason` `abort`; those that arrive later wait."""
        return await self._give(Order("pause"))

    async def resume(self, asked: Strict) -> Json:
        """Start requests again."""
        return await self._give(Order("resume"))

    async def load(self, asked: Folder) -> Json:
        """Replace all weights by those of a folder with a checkpoint of the same architecture and formats."""
        return await self._update(FromFolder(asked.model_path), asked)

    async def join(self, asked: Group) -> Json:
        """Join a trainer's process group, and leave an earlier one: worker i becomes rank `rank_offset` + i."""
        return await self._give(Order(JoinGroup(**asked.model_dump())))

    async def receive(self, asked: Announced) -> Json:
        """Replace weights by tensors that rank 0 of the group broadcasts, in this order."""
        names, dtypes, shapes = asked.names, asked.dtypes, asked.shapes
        if not len(set(names)) == len(names) == len(dtypes) == len(shapes):
            raise bad_value("names", f"must differ, and be as many ({len(names)}) as dtypes ({len(dtypes)}) and shapes ({len(shapes)})")
        return await self._update(FromGroup(names, dtypes, shapes), asked)

    async def _update(self, task: FromFolder | FromGroup, asked: Options) -> Json:
        return await self._give(Order(task, bool(asked.abort_all_requests), asked.weight_version))

    async def _give(self, order: Order) -> Json:
        """Wait until the order has been executed, after those before it. RequestError 400 with the reason if it was rejected, 503 if the
        server stops."""
        async with self._lock:
            health = self._registry.health
            health.check()
            self._inbox = self._inbox or AsyncInbox(self._run_dir, UPDATES_INBOX, OrderDone)
            self._scheduler.send(order)
            done: OrderDone | None = None
            while done is None:
                with contextlib.suppress(TimeoutError):
                    done = await asyncio.wait_for(self._inbox.recv(), POLL_S)
                if health.state == "stopping":
                    health.check()
            self._registry.weight_version = done.version
        if done.problem is not None:
            raise RequestError(400, done.problem, code="weight_update_refused")
        return {"success": True, "message": f"Done; the weights have the version {done.version}."}
