"""Orders that requests for weights become."""

import asyncio
from typing import Any, cast

import pytest

from engine.wire.messages import Event
from engine.wire.updates import FromFolder, FromGroup, JoinGroup, Order
from server.api.dialects.updates import WeightUpdates
from server.api.http.registry import Stream
from server.api.http.reply import GatheredReply
from server.api.schema.validate import check
from server.errors import ABORTED, RequestError
from tests.unit.server.in_process import virtual


class Noting(WeightUpdates):
    """Notes orders instead of sending them."""

    def __init__(self) -> None:
        self.orders: list[Order] = []

    async def _give(self, order: Order) -> Any:
        self.orders.append(order)


def order_of(path: str, body: dict[str, Any]) -> Order:
    noting = Noting()
    command: Any = next(route.app for route in noting.routes() if route.path == path)
    asyncio.run(command.run(check(command.takes, body)))
    (order,) = noting.orders
    return order


PLAIN = {"names": ["a"], "shapes": [[2, 3]]}
GROUP = {"master_address": "host", "master_port": 5, "rank_offset": 1, "world_size": 3}
JOIN = JoinGroup("weight_update_group", "nccl", "host", 5, 1, 3)
FROM_GROUP = FromGroup(["a"], ["bfloat16"], [[2, 3]])
ORDERS: list[tuple[str, dict[str, Any], Order]] = [
    ("/pause_generation", {"mode": "abort"}, Order("pause")),
    ("/continue_generation", {}, Order("resume")),
    ("/update_weights_from_disk", {"model_path": "x", "abort_all_requests": True}, Order(FromFolder("x"), True)),
    ("/update_weights_from_disk", {"model_path": "x", "weight_version": "2", "flush_cache": False}, Order(FromFolder("x"), False, "2")),
    ("/update_weights_from_distributed", {**PLAIN, "dtypes": ["bfloat16"], "group_name": "g"}, Order(FROM_GROUP)),
    ("/init_weights_update_group", GROUP, Order(JOIN)),
]


def test_orders() -> None:
    for path, body, order in ORDERS:
        assert order_of(path, body) == order, (path, body)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/pause_generation", {"mode": "retract"}, "mode: "),
        ("/update_weights_from_disk", {}, "model_path: "),
        ("/update_weights_from_disk", {"model_path": "x", "load_format": "pt"}, "load_format: "),
        ("/update_weights_from_distributed", {**PLAIN, "dtypes": []}, "as many (1) as dtypes (0)"),
        ("/update_weights_from_distributed", {"names": ["a", "a"], "shapes": [[1]] * 2, "dtypes": ["x"] * 2}, "must differ"),
        ("/update_weights_from_distributed", {"names": ["a"], "shapes": [[-1]], "dtypes": ["x"]}, "shapes[0][0]: "),
        ("/update_weights_from_distributed", {"names": [], "shapes": [], "dtypes": []}, "names: "),
        ("/init_weights_update_group", {**GROUP, "backend": "mpi"}, "backend: "),
        ("/init_weights_update_group", {**GROUP, "rank_offset": 0}, "rank_offset: "),
    ],
)
def test_refusals(path: str, body: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        order_of(path, body)
    assert refused.value.info.status == 400 and words in refused.value.info.message


@virtual
async def test_an_aborted_request_without_text_is_an_error() -> None:
    """An embedding without numbers would be a wrong answer."""
    stream = Stream([(1, 0)])
    reply = GatheredReply(cast(Any, None), [], cast(Any, None))
    reply.begin(stream, cast(Any, None), cast(Any, None))
    asyncio.get_running_loop().call_soon(stream.push, Event(1, finish_reason="abort"))
    assert await reply.respond(cast(Any, None)) == ABORTED
