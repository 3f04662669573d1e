"""Orders that requests for weights become, in the forms of vLLM and SGLang."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from engine.wire.messages import Event
from engine.wire.updates import (
    CudaMemory,
    FromFolder,
    FromGroup,
    FromMemory,
    Job,
    JoinGroup,
    LeaveGroup,
    Order,
    OrderDone,
    Pause,
    Rename,
    Segment,
    TensorSpec,
)
from server.dialects.updates import WeightUpdates, refusal_body
from server.errors import ABORTED, RequestError
from server.http.client import Stream
from server.http.reply import GatheredReply
from server.http.validate import check
from tests.unit.server.in_process import virtual


class Noted:
    """Stands in for `Orders`."""

    version, is_paused = "v", False

    def __init__(self) -> None:
        self.orders: list[Order] = []

    async def give(self, order: Callable[[int], Order]) -> OrderDone:
        self.orders.append(order(0))
        return OrderDone(0, "v", 0)


def order_of(path: str, body: dict[str, Any]) -> Order:
    noted: Any = Noted()
    command: Any = next(route.app for route in WeightUpdates(noted).routes() if route.path == path)
    asyncio.run(command.run(check(command.takes, body)))
    return noted.orders[0] if noted.orders else None


PLAIN = {"names": ["a"], "shapes": [[2, 3]]}
SPEC = TensorSpec("a", "bfloat16", (2, 3))
CUDA = {
    "type": "cuda", "handle": "eHg=", "storage_size_bytes": 12, "storage_offset_bytes": 0, "ref_counter_handle": "eQ==",
    "ref_counter_offset": 1, "event_handle": "eg==", "event_sync_required": True, "offset": 0, "stride": [3, 1],
}  # fmt: skip
MEMORY = CudaMemory(b"xx", 12, 0, b"y", 1, b"z", True, 0, (3, 1))
GROUP = {"master_address": "host", "master_port": 5, "rank_offset": 1, "world_size": 3}
JOIN = JoinGroup("weight_update_group", "nccl", "host", 5, 1, 3)
NAMED = [{"name": "a", "dtype": "bfloat16", "shape": [2, 3], "places": {"cpu": {"type": "segment", "name": "s", "offset": 64}}}]
ORDERS: list[tuple[str, dict[str, Any], Order | None]] = [
    ("/pause", {}, Pause(0, "abort")),
    ("/pause", {"wait_for_inflight_requests": "true"}, Pause(0, "wait")),
    ("/pause_generation", {"mode": "retract"}, Pause(0, "keep")),
    ("/update_weights_from_disk", {"model_path": "x", "abort_all_requests": True}, Job(0, FromFolder("x"), "abort")),
    ("/update_weights_from_disk", {"model_path": "x", "weight_version": "2", "flush_cache": False}, Job(0, FromFolder("x"), "wait", "2")),
    ("/update_weights_from_tensor", {"named_tensors": NAMED},
     Job(0, FromMemory((TensorSpec("a", "bfloat16", (2, 3), {"cpu": Segment("s", 64)}),)))),
    ("/update_weights", {"update_info": {**PLAIN, "dtype_names": ["bfloat16"], "ipc_handles": [{"GPU-1": CUDA}]}},
     Job(0, FromMemory((TensorSpec("a", "bfloat16", (2, 3), {"GPU-1": MEMORY}),)))),
    ("/update_weights", {"update_info": {**PLAIN, "dtype_names": ["bfloat16"]}}, Job(0, FromGroup("weight_update_group", (SPEC,)))),
    ("/update_weights_from_distributed", {**PLAIN, "dtypes": ["bfloat16"], "group_name": "g"}, Job(0, FromGroup("g", (SPEC,)))),
    ("/init_weights_update_group", GROUP, Job(0, JOIN)),
    ("/init_weight_transfer_engine", {"init_info": GROUP}, Job(0, JOIN)),
    ("/init_weight_transfer_engine", {"init_info": {}}, None),
    ("/start_weight_update", {"is_checkpoint_format": True}, None),
    ("/destroy_weights_update_group", {}, Job(0, LeaveGroup("weight_update_group"))),
    ("/update_weight_version", {"new_version": "3"}, Job(0, Rename(), "wait", "3")),
]  # fmt: skip


def test_orders() -> None:
    for path, body, order in ORDERS:
        assert order_of(path, body) == order, (path, body)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/pause", {"mode": "stop"}, "mode: must be"),
        ("/update_weights_from_disk", {}, "model_path: is missing"),
        ("/update_weights_from_disk", {"model_path": "x", "load_format": "pt"}, "load_format: must be"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["x"]}, "is a pickle"),
        ("/update_weights_from_tensor", {"named_tensors": []}, "at least one tensor"),
        ("/update_weights_from_tensor", {"named_tensors": NAMED * 2}, "each tensor once"),
        ("/update_weights_from_tensor", {"named_tensors": [{**NAMED[0], "shape": [-1]}]}, "must not be negative"),
        ("/update_weights_from_tensor", {"named_tensors": [{**NAMED[0], "places": {"cpu": {"type": "file"}}}]}, "Invalid value 'file'"),
        ("/update_weights_from_distributed", {**PLAIN, "dtypes": []}, "got 1, 0 and 1"),
        ("/update_weights", {"update_info": {**PLAIN, "dtype_names": ["x"], "ipc_handles_pickled": "gASV"}}, "is a pickle"),
        ("/update_weights", {"update_info": {**PLAIN, "dtype_names": ["x"], "packed": True}}, "packed: must be"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format: must be"),
        ("/init_weights_update_group", {**GROUP, "backend": "mpi"}, "backend: must be"),
    ],
)
def test_refusals(path: str, body: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        order_of(path, body)
    assert refused.value.info.status == 400 and words in refused.value.info.message
    assert b'"success":false' in refusal_body(refused.value.info)


@virtual
async def test_an_aborted_request_without_text_is_an_error() -> None:
    """An embedding without numbers would be a wrong answer."""
    stream = Stream([(1, 0)])
    reply = GatheredReply(show=cast(Any, None), stream=stream, client=cast(Any, None), metrics=cast(Any, None), num_images=0, deadline=None)
    asyncio.get_running_loop().call_soon(stream.push, Event(1, finish_reason="abort"))
    assert await reply.respond(cast(Any, None)) == ABORTED
