"""Images of a large body are decoded while the rest of it arrives; however the request then ends, every region comes back exactly once."""

import json
import os
from pathlib import Path

import pytest

from engine.messages import Region
from server.http.body import Body
from server.http.scan import Scanner
from tests.unit.server.raw_http import JPEG, body_of, connect, head_of, large_image, read_answer
from tests.unit.server.stack import MIB, Stack, hold
from tests.unit.server.test_stack import image, uri

NUM_IMAGES = 4


def images() -> list[bytes]:
    return [large_image(700_000) for _ in range(NUM_IMAGES)]


def ask(stack: Stack, body: bytes) -> tuple[int, dict[str, object]]:
    connection = connect(stack)
    connection.sendall(head_of(len(body)) + body)
    answer = read_answer(connection)
    connection.close()
    return answer


def is_decoded(stack: Stack, data: bytes) -> bool:
    return bytes(stack.scheduler._arena.buffer).find(data[-5_000:]) >= 0


def test_an_image_is_decoded_before_the_body_ends(stack: Stack) -> None:
    """Red if the processor hears of images only when the last byte is here, or of one that has not arrived."""
    pictures = images()
    body = body_of(*pictures)
    connection = connect(stack)
    connection.sendall(head_of(len(body)) + body[: -MIB // 2])
    stack.wait_until(lambda: all(is_decoded(stack, picture) for picture in pictures[:-1]))
    assert not is_decoded(stack, pictures[-1])
    connection.sendall(body[-MIB // 2 :])
    assert read_answer(connection)[0] == 200
    assert [stack.scheduler.image(stack.scheduler.requests[-1], i) for i in range(NUM_IMAGES)] == pictures
    connection.close()


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_a_body_that_breaks_off_between_images(stack: Stack, share: float) -> None:
    """Red if what was begun is lost, or given back while a thread still reads or writes it (fixture)."""
    body = body_of(*images())
    for _ in range(3):
        connection = connect(stack)
        connection.sendall(head_of(len(body)) + body[: int(share * len(body))])
        connection.close()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda body: body[:-1] + b"!", 400),
        (lambda body: body[:-1] + b', "model": "another"}', 404),
        (lambda body: body[:-1] + b', "temperature": "hot"}', 400),
        (lambda body: body.replace(b";base64,", b";base64,!", 1), 422),
        (lambda body: body[:-1] + b', "user": "data:image/jpeg;base64,' + b"A" * 400_000 + b'"}', 200),
        (lambda body: body[:-1] + b', "user": "data:image/jpeg;base64,' + b"!" * 400_000 + b'"}', 200),
    ],
)
def test_a_body_that_is_refused_at_its_end(stack: Stack, change: object, status: int) -> None:
    """Red if a refusal leaves regions behind, if an image that was begun is refused otherwise than one that was not, or if one that is no
    image of the request makes it fail."""
    assert callable(change)
    assert ask(stack, change(body_of(*images())))[0] == status


def test_media_that_are_no_images_of_the_request(stack: Stack) -> None:
    """Red if the body of a request without images is given back twice, or not at all, because something in it looked like one."""
    fields = {"messages": [{"role": "user", "content": "hi"}], "user": uri(large_image(700_000)), "metadata": {"padding": "x" * MIB}}
    assert ask(stack, json.dumps(fields).encode())[0] == 200


def test_a_client_that_leaves_when_it_has_sent_all(stack: Stack) -> None:
    """Red if an abort right behind the Submit gives back what pool threads work on."""
    body = body_of(*images())
    stack.scheduler.script = hold
    for _ in range(5):
        connection = connect(stack)
        connection.sendall(head_of(len(body)) + body)
        connection.close()


def test_images_that_never_fit_are_still_a_413(model_folder: Path) -> None:
    """Red if early decoding turns a lack of room into another error, or keeps what it has taken."""
    stack = Stack(model_folder, processor_arena_bytes=2 * MIB)
    try:
        assert ask(stack, body_of(*images()))[0] == 413
        assert stack.chat([image(uri(JPEG))]).status_code == 200
        stack.settle()
    finally:
        stack.close()


def test_a_full_queue_gives_back_what_was_begun(model_folder: Path) -> None:
    """Red if a request that is refused after its images were begun leaves them, or its body, behind."""
    stack = Stack(model_folder, max_queued_requests=1)
    stack.scheduler.script = hold
    try:
        with stack.http.stream("POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "stream": True}):
            assert ask(stack, body_of(*images()))[0] == 503
        stack.settle()
    finally:
        stack.close()


class Announced:
    """A client table that only listens."""

    def __init__(self) -> None:
        self.payloads: list[Region] = []

    def new_rid(self) -> int:
        return 1

    def announce(self, rid: int, payload: Region) -> None:
        self.payloads.append(payload)


def test_each_image_is_announced_once_and_whole() -> None:
    """Red if a payload is announced before its last byte, twice, or beyond the limit on images."""
    data = body_of(*(os.urandom(3_000) for _ in range(5)))
    scanner, listener = Scanner("0" * 32, 100), Announced()

    class FixedRegion:
        offset = 4096

    body = Body(FixedRegion(), scanner, listener, 0.0)  # type: ignore[arg-type]
    for start in range(0, len(data), 700):
        scanner.feed(data[start : start + 700])
        body.announce(4)
        complete = data[: start + 700].count(b'"}}')
        assert len(listener.payloads) in (min(4, complete), min(4, complete + 1))
    assert [(p.offset - 4096, p.length) for p in listener.payloads] == [(r.offset, r.length) for r in scanner.references[:4]]
