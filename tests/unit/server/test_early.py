"""Images that are read before there is a plan: by rank 0, and by the processor while the rest of a body arrives."""

import contextlib
import dataclasses
import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.wire.arena import Arena, create_memfd
from engine.wire.config import EngineConfig
from engine.wire.messages import API_ARENA, ImageSource, Prefetch, Region
from models.media.geometry import VisionGeometry
from server.api.http.body import read_body
from server.processor.media.image import MAX_BYTES, EarlyReads
from tests.eventually import eventually
from tests.unit.server.conftest import StackOf
from tests.unit.server.raw_http import JPEG, body_of, connect, head_of, large_image, read_answer, request_of, text_body
from tests.unit.server.stack import MIB, Stack, hold
from tests.unit.server.test_stack import image, uri

SOURCE = ImageSource("jpeg", Region(1, 0, 1000), 720, 1280)
GEOMETRY = VisionGeometry(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=1 << 16, max_pixels=1 << 24)
GRID = GEOMETRY.grid(720, 1280)


@pytest.fixture
def sent() -> list[Prefetch]:
    return []


@pytest.fixture
def early(sent: list[Prefetch]) -> EarlyReads:
    worker: Any = SimpleNamespace(send=sent.append)
    return EarlyReads(worker, GEOMETRY)


def announce(early: EarlyReads, name: str, source: ImageSource = SOURCE) -> int:
    return early.announce(memoryview(name.encode()), source)


def test_the_first_new_image_of_an_idle_engine(early: EarlyReads, sent: list[Prefetch]) -> None:
    assert announce(early, "a") == 0  # nobody said that the engine is idle
    early.arm(is_idle=True)
    assert announce(early, "a") == 0  # seen before, so it is encoded as a rule
    ticket = announce(early, "b")
    assert ticket and sent == [Prefetch(msgspec.structs.replace(SOURCE, ticket=ticket), GRID)]
    assert announce(early, "c") == 0  # one is enough: the others are read while the device works on it
    early.arm(is_idle=True)
    assert announce(early, "d") == ticket + 1


def test_a_busy_engine_is_left_alone(early: EarlyReads, sent: list[Prefetch]) -> None:
    early.arm(is_idle=True)  # a text
    early.arm(is_idle=False)
    assert announce(early, "a") == 0 and not early.is_urgent and not sent


def test_large_images_wait_for_their_plan(early: EarlyReads, sent: list[Prefetch]) -> None:
    early.arm(is_idle=True)
    for height, width in ((8000, 8000), (1440, 2560), (2, 4000)):
        assert announce(early, f"{height}", ImageSource("jpeg", Region(1, 0, 1000), height, width)) == 0
    assert early.announce(memoryview(bytes(MAX_BYTES + 1)), SOURCE) == 0
    assert not sent and announce(early, "c")


def test_without_a_gpu_nobody_is_told() -> None:
    early = EarlyReads(None, GEOMETRY)
    early.arm(is_idle=True)
    assert announce(early, "a") == 0 and not early.is_urgent


def test_the_size_is_what_the_last_request_wanted(early: EarlyReads, sent: list[Prefetch]) -> None:
    """Red if a client that always has its images made smaller always has one encoded in vain."""
    early.geometry = dataclasses.replace(GEOMETRY, max_pixels=1 << 18)
    early.arm(is_idle=True)
    announce(early, "a")
    assert [prefetch.grid for prefetch in sent] == [early.geometry.grid(720, 1280)] != [GRID]


NUM_IMAGES = 4


def images() -> list[bytes]:
    return [large_image(700_000) for _ in range(NUM_IMAGES)]


def ask(stack: Stack, body: bytes) -> tuple[int, dict[str, object]]:
    with connect(stack) as connection:
        connection.sendall(request_of(body))
        return read_answer(connection)


def is_decoded(stack: Stack, data: bytes) -> bool:
    return bytes(stack.scheduler._arena.buffer).find(data[-5_000:]) >= 0


def test_an_image_is_decoded_before_the_body_ends(stack: Stack) -> None:
    pictures = images()
    body = body_of(*pictures)
    connection = connect(stack)
    connection.sendall(head_of(len(body)) + body[: -MIB // 2])
    eventually(lambda: all(is_decoded(stack, picture) for picture in pictures[:-1]), "the first images in the arena")
    assert not is_decoded(stack, pictures[-1])
    connection.sendall(body[-MIB // 2 :])
    assert read_answer(connection)[0] == 200
    assert [stack.scheduler.image(stack.last, i) for i in range(NUM_IMAGES)] == pictures
    connection.close()


def test_a_body_that_breaks_off_between_images(stack: Stack) -> None:
    body = body_of(*images())
    for share in (0.3, 0.6, 0.99):
        for _ in range(3):
            with connect(stack) as connection:
                connection.sendall(head_of(len(body)) + body[: int(share * len(body))])
    eventually(lambda: ask(stack, body)[0] == 200, "memory of the broken-off bodies is free")


def test_a_body_that_is_refused_at_its_end(stack: Stack) -> None:
    body = body_of(*images()[:2])
    no_image = b', "user": "data:image/jpeg;base64,'
    for changed, status in (
        (body[:-1] + b"!", 400),
        (body[:-1] + b', "model": "another"}', 404),
        (body[:-1] + b', "temperature": "hot"}', 400),
        (body.replace(b";base64,", b";base64,!", 1), 422),
        (body[:-1] + no_image + b"A" * 400_000 + b'"}', 200),
        (body[:-1] + no_image + b"!" * 400_000 + b'"}', 200),
        (text_body("hi", user=uri(large_image(700_000)), metadata={"padding": "x" * MIB}), 200),
    ):
        assert ask(stack, changed)[0] == status


def test_images_that_find_no_place(stack_of: StackOf, model_folder: Path) -> None:
    stack = stack_of(model_folder, processor_arena_bytes=2 * MIB, max_queued_requests=1)
    body = body_of(*images())
    assert ask(stack, body)[0] == 413
    assert stack.chat([image(uri(JPEG))]).status_code == 200
    stack.script = hold
    with contextlib.ExitStack() as undo:
        post = functools.partial(stack.http.stream, "POST", "/v1/chat/completions", content=text_body(stream=True))
        eventually(lambda: undo.enter_context(post()).status_code == 200, "a free place in the queue")
        assert ask(stack, body)[0] == 503
    stack.reset()
    eventually(lambda: stack.chat("x").status_code == 200, "a free place in the queue")
    stack.settle()


class Announced:
    def __init__(self) -> None:
        self.payloads: list[Region] = []

    def new_rid(self) -> int:
        return 1

    def announce(self, rid: int, payload: Region) -> None:
        self.payloads.append(payload)


@pytest.mark.parametrize(("count", "announced"), [(1, 1), (3, 2)])
async def test_images_are_announced_once_and_before_the_json_around_them_is_validated(count: int, announced: int) -> None:
    """Also one that arrives with the end of its body, as a single picture does; none beyond the limit on images."""
    data, listener = body_of(*(os.urandom(3_000) for _ in range(count))), Announced()
    pieces = iter([(data[: len(data) // 2], True), (data[len(data) // 2 :], False)])

    async def receive() -> dict[str, object]:
        return {"type": "http.request"} | dict(zip(("body", "more_body"), next(pieces), strict=True))

    config = EngineConfig(max_images_per_request=2)
    body = await read_body(receive, len(data), Arena(create_memfd("api", 1 << 20), 1 << 20), config, listener)
    references = body.scanner.references[:announced]
    assert listener.payloads == [Region(API_ARENA, body.region.offset + each.offset, each.length) for each in references]
