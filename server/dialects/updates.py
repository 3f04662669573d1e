"""Weight updates by the routes of vLLM and of SGLang: pause, replace weights, resume. Served only with `--enable-weight-updates`.

body ──▶ request type ──▶ order ──▶ scheduler ──▶ OrderDone ──▶ the document of the route's server
"""

import asyncio
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from engine.launch.child import Child
from engine.wire.messages import ErrorInfo
from engine.wire.updates import (
    Drain,
    FromFolder,
    FromGroup,
    FromMemory,
    Job,
    JoinGroup,
    LeaveGroup,
    Pause,
    Rename,
    Resume,
    TensorSpec,
)
from server.errors import RequestError, error_body
from server.http.client import Client
from server.http.updates import Orders
from server.http.validate import Strict, bad_value, check, read_object
from server.openai.openapi import BodyRoute, DescribedRoute

Json = dict[str, Any]
MAX_BYTES = 64 << 20  # limit of a body, enough for tens of thousands of tensors
GROUP = "weight_update_group"
DRAINS: dict[str | None, Drain] = {
    None: "abort", "abort": "abort", "wait": "wait", "finish": "wait", "keep": "keep", "retract": "keep", "in_place": "keep",
}  # fmt: skip
PICKLE = "is a pickle, which is not accepted: send names, dtypes, shapes and plain handles as docs/guides/weight-updates.md describes"
UPDATE_PATHS = "/update_weights_from_"  # SGLang's


class Done(BaseModel):
    """Answer of all routes: vLLM's have a `status` or nothing else, SGLang's have `success`."""

    message: str
    status: str | None = None
    success: bool | None = None


class Nothing(Strict):
    """A body whose fields are all ignored."""


class WeightRoute:
    """ASGI application that gives one order."""

    takes: ClassVar[type[Strict]] = Nothing
    gives: ClassVar[type[BaseModel]] = Done
    streams: Any = None
    last_data = ""

    def __init__(self, orders: Orders):
        self.orders = orders

    async def run(self, asked: Any) -> Json:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, data = Request(scope, receive), b""
        async for part in request.stream():
            data += part
            if len(data) > MAX_BYTES:
                raise RequestError(413, f"The body is larger than {MAX_BYTES >> 20} MiB: send the tensors in several requests.")
        value = dict(request.query_params) | (await asyncio.to_thread(read_object, data) if data.strip() else {})
        response = JSONResponse(await self.run(check(self.takes, value)))
        await response(scope, receive, send)

    async def update(self, task: Any, asked: "Options") -> Json:
        drain: Drain = "abort" if asked.abort_all_requests else "wait"
        done = await self.orders.give(lambda number: Job(number, task, drain, asked.weight_version))
        words = f"The weights have the version {done.version}."
        return {"success": True, "message": words, "num_paused_requests": done.num_waiting}


class Mode(Strict):
    mode: Literal["abort", "wait", "finish", "keep", "retract", "in_place"] | None = None
    wait_for_inflight_requests: str | bool | None = None


class PauseRoute(WeightRoute):
    """Start no further requests. Running ones end (`abort`), finish (`wait`) or continue after the resume (`keep`)."""

    takes = Mode

    async def run(self, asked: Mode) -> Json:
        waits = asked.mode is None and str(asked.wait_for_inflight_requests).lower() == "true"
        self.orders.is_paused = True
        await self.orders.give(lambda number: Pause(number, "wait" if waits else DRAINS[asked.mode]))
        return {"status": "paused", "message": "Generation is paused."}


class ResumeRoute(WeightRoute):
    """Start requests again."""

    async def run(self, asked: Nothing) -> Json:
        await self.orders.give(Resume)
        self.orders.is_paused = False
        return {"status": "resumed", "message": "Generation continues."}


class Options(Strict):
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    load_format: Literal["auto", "safetensors"] | None = None


class Folder(Options):
    model_path: str


class FolderRoute(WeightRoute):
    """Replace all weights by those of a folder with a checkpoint of the same architecture and formats."""

    takes = Folder

    async def run(self, asked: Folder) -> Json:
        return await self.update(FromFolder(asked.model_path), asked)


class NamedTensors(Options):
    named_tensors: list[Json] | None = None
    serialized_named_tensors: Any = None


class MemoryRoute(WeightRoute):
    """Replace weights by tensors in memory of a process on this host: shared memory, or CUDA IPC."""

    takes = NamedTensors

    async def run(self, asked: NamedTensors) -> Json:
        if asked.serialized_named_tensors is not None:
            raise bad_value("serialized_named_tensors", PICKLE)
        return await self.update(FromMemory(_specs(asked.named_tensors or [], "named_tensors")), asked)


class Group(Strict):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = GROUP
    backend: Literal["nccl", "gloo"] = "nccl"


class GroupName(Strict):
    group_name: str = GROUP


class JoinRoute(WeightRoute):
    """Join a trainer's process group: its rank 0 waits at the address, worker i becomes rank `rank_offset` + i."""

    takes = Group

    async def run(self, asked: Group) -> Json:
        task = JoinGroup(asked.group_name, asked.backend, asked.master_address, asked.master_port, asked.rank_offset, asked.world_size)
        await self.orders.give(lambda number: Job(number, task))
        return {"success": True, "message": f"All workers have joined {asked.group_name}."}


class LeaveRoute(WeightRoute):
    """Leave a process group."""

    takes = GroupName

    async def run(self, asked: GroupName) -> Json:
        await self.orders.give(lambda number: Job(number, LeaveGroup(asked.group_name)))
        return {"success": True, "message": f"All workers have left {asked.group_name}."}


class Announced(Options):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = GROUP


class BroadcastRoute(WeightRoute):
    """Replace weights by tensors that rank 0 of the group broadcasts, in this order."""

    takes = Announced

    async def run(self, asked: Announced) -> Json:
        specs = _zipped(asked.names, asked.dtypes, asked.shapes, [{}] * len(asked.names))
        return await self.update(FromGroup(asked.group_name, specs), asked)


class Version(Options):
    weight_version: str = Field(alias="new_version")


class RenameRoute(WeightRoute):
    """Change only the version of the weights."""

    takes = Version

    async def run(self, asked: Version) -> Json:
        return await self.update(Rename(), asked)


class Start(Strict):
    is_checkpoint_format: Literal[True] | None = None


class MarkRoute(WeightRoute):
    """vLLM's markers of an update's first and last request. They have no effect: between pause and resume updates belong together."""

    takes = Start

    async def run(self, asked: Start) -> Json:
        return {"message": "Weight update noted"}


class InitInfo(Strict):
    init_info: Json


class InitRoute(WeightRoute):
    """vLLM's route for joining a group; without an address it has no effect."""

    takes = InitInfo

    async def run(self, asked: InitInfo) -> Json:
        if asked.init_info:
            await JoinRoute(self.orders).run(check(Group, asked.init_info))
        return {"message": "Weight transfer initialized"}


class Transfer(Strict):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    ipc_handles: list[Json] | None = None
    ipc_handles_pickled: Any = None
    packed: Literal[False] | None = None
    group_name: str = GROUP


class UpdateInfo(Options):
    update_info: Transfer


class UpdateRoute(WeightRoute):
    """vLLM's route for an update: from handles if there are any, otherwise from the group that was joined."""

    takes = UpdateInfo

    async def run(self, asked: UpdateInfo) -> Json:
        info = asked.update_info
        if info.ipc_handles_pickled is not None:
            raise bad_value("update_info.ipc_handles_pickled", PICKLE)
        specs = _zipped(info.names, info.dtype_names, info.shapes, info.ipc_handles or [{}] * len(info.names))
        await self.update(FromGroup(info.group_name, specs) if info.ipc_handles is None else FromMemory(specs), asked)
        return {"message": "Weights updated"}


def _zipped(names: list[str], dtypes: list[str], shapes: list[list[int]], places: list[Json]) -> tuple[TensorSpec, ...]:
    if not len(names) == len(dtypes) == len(shapes) == len(places):
        raise bad_value("names", f"must be as many as dtypes and shapes, got {len(names)}, {len(dtypes)} and {len(shapes)}")
    columns = zip(names, dtypes, shapes, places, strict=True)
    return _specs([{"name": name, "dtype": dtype, "shape": shape, "places": place} for name, dtype, shape, place in columns], "names")


def _specs(values: list[Json], field: str) -> tuple[TensorSpec, ...]:
    try:
        specs = msgspec.convert(values, tuple[TensorSpec, ...])
    except msgspec.ValidationError as problem:
        raise bad_value(field, f"holds no description of a tensor: {problem}") from None
    if not specs or any(size < 0 for spec in specs for size in spec.shape):
        raise bad_value(field, "must name at least one tensor, and sizes must not be negative")
    if len({spec.name for spec in specs}) < len(specs):
        raise bad_value(field, "must name each tensor once")
    return specs


ROUTES: dict[str, type[WeightRoute]] = {
    "/pause": PauseRoute,
    "/resume": ResumeRoute,
    "/init_weight_transfer_engine": InitRoute,
    "/start_weight_update": MarkRoute,
    "/update_weights": UpdateRoute,
    "/finish_weight_update": MarkRoute,
    "/pause_generation": PauseRoute,
    "/continue_generation": ResumeRoute,
    "/update_weights_from_disk": FolderRoute,
    "/update_weights_from_tensor": MemoryRoute,
    "/init_weights_update_group": JoinRoute,
    "/destroy_weights_update_group": LeaveRoute,
    "/update_weights_from_distributed": BroadcastRoute,
    "/update_weight_version": RenameRoute,
}


class WeightStatus:
    """Routes that report the state."""

    def __init__(self, orders: Orders):
        self._orders = orders

    def routes(self) -> list[DescribedRoute]:
        gets = {
            "/is_paused": self.is_paused, "/get_world_size": self.world_size, "/get_weight_version": self.version,
            "/weight_version": self.version,
        }  # fmt: skip
        return [DescribedRoute(path, method, "GET", Json) for path, method in gets.items()]

    async def is_paused(self) -> Any:
        """Whether the engine is paused."""
        return {"is_paused": self._orders.is_paused}

    async def world_size(self) -> Any:
        """The number of workers, which are the ranks of a group except the trainer's."""
        return {"world_size": self._orders.num_ranks}

    async def version(self) -> Any:
        """The version of the weights."""
        return {"weight_version": self._orders.version}


def weight_routes(child: Child, client: Client) -> list[DescribedRoute]:
    """Return all routes; none without the flag."""
    if not child.config.enable_weight_updates:
        return []
    orders = Orders(child, client)
    return [*(BodyRoute(path, route(orders)) for path, route in ROUTES.items()), *WeightStatus(orders).routes()]


def refusal_body(info: ErrorInfo) -> bytes:
    """Return an error in SGLang's form, which also has the members of OpenAI's."""
    return msgspec.json.encode({"success": False, "message": info.message, **msgspec.json.decode(error_body(info))})
