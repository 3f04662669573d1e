"""Weight updates by the routes of vLLM and of SGLang: pause, replace weights, resume. Served only with `--enable-weight-updates`.

body ──▶ request type ──▶ order ──▶ scheduler ──▶ OrderDone ──▶ the document of the route's server
"""

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field

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
from server.errors import error_body
from server.http.client import Client
from server.http.updates import Orders
from server.http.validate import Strict, bad_value, check
from server.openai.command import Command, Run
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


class Mode(Strict):
    mode: Literal["abort", "wait", "finish", "keep", "retract", "in_place"] | None = None
    wait_for_inflight_requests: str | bool | None = None


class Options(Strict):
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    load_format: Literal["auto", "safetensors"] | None = None


class Folder(Options):
    model_path: str


class NamedTensors(Options):
    named_tensors: list[Json] | None = None
    serialized_named_tensors: Any = None


class Group(Strict):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = GROUP
    backend: Literal["nccl", "gloo"] = "nccl"


class GroupName(Strict):
    group_name: str = GROUP


class Announced(Options):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = GROUP


class Version(Options):
    weight_version: str = Field(alias="new_version")


class Start(Strict):
    is_checkpoint_format: Literal[True] | None = None


class InitInfo(Strict):
    init_info: Json


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


class WeightUpdates:
    """Methods of the routes. Those with a body give an order; the type of `asked` is the body's."""

    def __init__(self, orders: Orders):
        self._orders = orders

    def routes(self) -> list[DescribedRoute]:
        posts: dict[str, Run] = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/init_weight_transfer_engine": self.init,
            "/start_weight_update": self.mark,
            "/update_weights": self.update,
            "/finish_weight_update": self.mark,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.load,
            "/update_weights_from_tensor": self.copy,
            "/init_weights_update_group": self.join,
            "/destroy_weights_update_group": self.leave,
            "/update_weights_from_distributed": self.receive,
            "/update_weight_version": self.rename,
        }
        gets = {
            "/is_paused": self.is_paused, "/get_world_size": self.world_size, "/get_weight_version": self.version,
            "/weight_version": self.version,
        }  # fmt: skip
        commands = [BodyRoute(path, Command(method, Done, MAX_BYTES)) for path, method in posts.items()]
        return commands + [DescribedRoute(path, method) for path, method in gets.items()]

    async def pause(self, asked: Mode) -> Json:
        """Start no further requests. Running ones end (`abort`), finish (`wait`) or continue after the resume (`keep`)."""
        waits = asked.mode is None and str(asked.wait_for_inflight_requests).lower() == "true"
        self._orders.is_paused = True
        await self._orders.give(lambda number: Pause(number, "wait" if waits else DRAINS[asked.mode]))
        return {"status": "paused", "message": "Generation is paused."}

    async def resume(self, asked: Nothing) -> Json:
        """Start requests again."""
        await self._orders.give(Resume)
        self._orders.is_paused = False
        return {"status": "resumed", "message": "Generation continues."}

    async def load(self, asked: Folder) -> Json:
        """Replace all weights by those of a folder with a checkpoint of the same architecture and formats."""
        return await self._update(FromFolder(asked.model_path), asked)

    async def copy(self, asked: NamedTensors) -> Json:
        """Replace weights by tensors in memory of a process on this host: shared memory, or CUDA IPC."""
        if asked.serialized_named_tensors is not None:
            raise bad_value("serialized_named_tensors", PICKLE)
        return await self._update(FromMemory(_specs(asked.named_tensors or [], "named_tensors")), asked)

    async def join(self, asked: Group) -> Json:
        """Join a trainer's process group: its rank 0 waits at the address, worker i becomes rank `rank_offset` + i."""
        task = JoinGroup(asked.group_name, asked.backend, asked.master_address, asked.master_port, asked.rank_offset, asked.world_size)
        await self._orders.give(lambda number: Job(number, task))
        return {"success": True, "message": f"All workers have joined {asked.group_name}."}

    async def leave(self, asked: GroupName) -> Json:
        """Leave a process group."""
        await self._orders.give(lambda number: Job(number, LeaveGroup(asked.group_name)))
        return {"success": True, "message": f"All workers have left {asked.group_name}."}

    async def receive(self, asked: Announced) -> Json:
        """Replace weights by tensors that rank 0 of the group broadcasts, in this order."""
        specs = _zipped(asked.names, asked.dtypes, asked.shapes, [{}] * len(asked.names))
        return await self._update(FromGroup(asked.group_name, specs), asked)

    async def rename(self, asked: Version) -> Json:
        """Change only the version of the weights."""
        return await self._update(Rename(), asked)

    async def mark(self, asked: Start) -> Json:
        """vLLM's markers of an update's first and last request. They have no effect: between pause and resume updates belong together."""
        return {"message": "Weight update noted"}

    async def init(self, asked: InitInfo) -> Json:
        """vLLM's route for joining a group; without an address it has no effect."""
        if asked.init_info:
            await self.join(check(Group, asked.init_info))
        return {"message": "Weight transfer initialized"}

    async def update(self, asked: UpdateInfo) -> Json:
        """vLLM's route for an update: from handles if there are any, otherwise from the group that was joined."""
        info = asked.update_info
        if info.ipc_handles_pickled is not None:
            raise bad_value("update_info.ipc_handles_pickled", PICKLE)
        specs = _zipped(info.names, info.dtype_names, info.shapes, info.ipc_handles or [{}] * len(info.names))
        await self._update(FromGroup(info.group_name, specs) if info.ipc_handles is None else FromMemory(specs), asked)
        return {"message": "Weights updated"}

    async def is_paused(self) -> Json:
        """Whether the engine is paused."""
        return {"is_paused": self._orders.is_paused}

    async def world_size(self) -> Json:
        """The number of workers, which are the ranks of a group except the trainer's."""
        return {"world_size": self._orders.num_ranks}

    async def version(self) -> Json:
        """The version of the weights."""
        return {"weight_version": self._orders.version}

    async def _update(self, task: Any, asked: Options) -> Json:
        drain: Drain = "abort" if asked.abort_all_requests else "wait"
        done = await self._orders.give(lambda number: Job(number, task, drain, asked.weight_version))
        words = f"The weights have the version {done.version}."
        return {"success": True, "message": words, "num_paused_requests": done.num_waiting}


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


def weight_routes(child: Child, client: Client) -> list[DescribedRoute]:
    """Return all routes; none without the flag."""
    return WeightUpdates(Orders(child, client)).routes() if child.config.enable_weight_updates else []


def refusal_body(info: ErrorInfo) -> bytes:
    """Return an error in SGLang's form, which also has the members of OpenAI's."""
    return msgspec.json.encode({"success": False, "message": info.message, **msgspec.json.decode(error_body(info))})
