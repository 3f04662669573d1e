"""Files that were decoded before stay files until the scheduler wants their pixels; however that ends, every region comes back once."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from PIL import Image

from engine.wire.messages import EngineRequest, ErrorInfo, RequestOutput
from tests.eventually import HANG_GUARD_S, eventually
from tests.unit.server.pictures import PLAIN, save
from tests.unit.server.stack import MIB, Stack, StackOf, answer_ids, answer_text, hold_silently
from tests.unit.server.test_stack import image, uri, user
from tests.unit.server.test_stack_edges import sent

LARGE = [save(Image.new("RGB", (900, 900), (i, 2 * i, 3 * i)), "PNG") for i in range(4)]  # 2.4 MB of pixels each


@pytest.fixture(autouse=True)
def clean(stack: Stack) -> Iterator[None]:
    stack.scheduler.pixels.clear()
    yield
    stack.recover()
    assert not [pixels for pixels in stack.scheduler.pixels if pixels.error is not None]


def content(files: list[bytes]) -> list[dict[str, object]]:
    return [image(uri(data, "image/png")) for data in files]


class Asking:
    """A client whose request the scheduler keeps until the test says how it ends."""

    def __init__(self, stack: Stack, files: list[bytes]):
        self._stack = stack
        stack.script = hold_silently
        count = len(stack.scheduler.requests)
        self._thread = threading.Thread(target=lambda: self._responses.append(stack.chat(content(files))))
        self._responses: list[httpx.Response] = []
        self._thread.start()
        eventually(lambda: len(stack.scheduler.requests) > count)
        self.request: EngineRequest = stack.last

    def end(self, output: RequestOutput | None = None) -> httpx.Response:
        """Send the scheduler's last output; return what the client gets."""
        if output is None:
            answer_ids([65])(self._stack.scheduler, self.request)
        else:
            self._stack.scheduler.send([output], [self.request.rid])
        self._thread.join(HANG_GUARD_S)
        return self._responses[0]


def test_a_client_that_leaves_while_files_are_decoded(stack: Stack) -> None:
    """Red if regions are given back while a thread writes to them, twice, or never (fixture)."""
    assert stack.chat(content(LARGE)).status_code == 200
    stack.script = hold_silently
    for num_decoded_before in (None, 0, 1, 3):
        stack.scheduler.pixels.clear()
        count = len(stack.scheduler.requests)
        with sent(stack, json.dumps({"messages": user(content(LARGE))}).encode()):
            eventually(lambda count=count: len(stack.scheduler.requests) > count)
            request = stack.last
            assert request.images[0].source.encoding == "file"
            stack.scheduler.want(request.rid, 0, 1, 2, 3)
            if num_decoded_before is not None:
                stack.settle()  # the decoding has begun
                eventually(lambda least=num_decoded_before: len(stack.scheduler.pixels) >= least)
        eventually(lambda rid=request.rid: rid in stack.scheduler.aborted)


def test_the_scheduler_wants_pixels_of_a_request_that_has_gone(stack: Stack) -> None:
    stack.chat(content(LARGE[:1]))
    asking = Asking(stack, LARGE[:1])
    assert asking.end().status_code == 200
    stack.scheduler.want(asking.request.rid, 0)
    stack.settle()
    assert not stack.scheduler.pixels


def test_a_release_while_files_are_decoded(stack: Stack) -> None:
    stack.chat(content(LARGE))
    asking = Asking(stack, LARGE)
    stack.scheduler.want(asking.request.rid, 0, 1, 2, 3)
    failure = ErrorInfo(503, "no", code="overloaded", retry_after=60)
    response = asking.end(RequestOutput(asking.request.rid, [], error=failure))
    assert (response.status_code, response.headers["retry-after"]) == (503, "60")


def test_room_for_pixels_is_waited_for(stack_of: StackOf, model_folder: Path) -> None:
    stack = stack_of(model_folder, processor_arena_bytes=6 * MIB)
    assert stack.chat(content(LARGE[:1])).status_code == 200
    others = [Asking(stack, [data]) for data in LARGE[1:3]]
    asking = Asking(stack, LARGE[:1])
    assert [span.source.encoding for span in asking.request.images] == ["file"]
    stack.scheduler.want(asking.request.rid, 0)
    stack.settle()
    assert not stack.scheduler.pixels
    assert others[0].end().status_code == 200
    eventually(lambda: len(stack.scheduler.pixels) == 1)
    assert stack.scheduler.pixels[0].error is None
    assert others[1].end().status_code == asking.end().status_code == 200
    stack.settle()


def test_no_room_for_pixels_is_a_503(stack_of: StackOf, model_folder: Path) -> None:
    stack = stack_of(model_folder, processor_arena_bytes=3 * MIB)
    for data in LARGE[:2]:
        assert stack.chat(content([data])).status_code == 200
        stack.settle()  # its memory is free again
    asking = Asking(stack, LARGE[:2])
    stack.scheduler.want(asking.request.rid, 0, 1)
    eventually(lambda: len(stack.scheduler.pixels) == 2)
    errors = [pixels.error for pixels in stack.scheduler.pixels if pixels.error is not None]
    assert [(error.status, error.retry_after) for error in errors] == [(503, 1)]
    assert asking.end(RequestOutput(asking.request.rid, [], error=errors[0])).status_code == 503
    stack.script = answer_text
    assert stack.chat([image(uri(PLAIN["4:2:0"]))]).status_code == 200
    stack.settle()
