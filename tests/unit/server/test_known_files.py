"""Files are decoded if the scheduler wants their pixels. Requests wait for memory; however that ends, every region comes back once."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.eventually import eventually
from tests.unit.server.pictures import save
from tests.unit.server.stack import MIB, Stack, StackOf, hold_silently
from tests.unit.server.test_stack import image, uri, user
from tests.unit.server.test_stack_edges import sent

LARGE = [save(Image.new("RGB", (900, 900), (i, 2 * i, 3 * i)), "PNG") for i in range(4)]  # 2.4 MB of pixels each


@pytest.fixture(autouse=True)
def clean(stack: Stack) -> Iterator[None]:
    stack.scheduler.pixels.clear()
    yield
    stack.scheduler.wants = True
    stack.recover()
    assert not [pixels for pixels in stack.scheduler.pixels if pixels.error is not None]


def content(files: list[bytes]) -> list[dict[str, object]]:
    return [image(uri(data, "image/png")) for data in files]


def test_a_client_that_leaves_while_files_are_decoded(stack: Stack) -> None:
    for is_decoded in (False, True):
        stack.scheduler.wants, stack.script = False, hold_silently
        stack.scheduler.pixels.clear()
        count = len(stack.scheduler.requests)
        with sent(stack, json.dumps({"messages": user(content(LARGE))}).encode()):
            eventually(lambda count=count: len(stack.scheduler.requests) > count)
            request = stack.last
            assert {span.source.encoding for span in request.images} == {"file"}
            stack.scheduler.want(request.rid, 0, 2)
            stack.scheduler.want(request.rid, 0, 1, 2, 3)
            if is_decoded:
                eventually(lambda: len(stack.scheduler.pixels) == 2)
                few, all_of_them = stack.scheduler.pixels
                assert few.sources.items() < all_of_them.sources.items()
            else:
                stack.settle()  # the decoding has begun
        eventually(lambda rid=request.rid: rid in stack.scheduler.aborted)


def test_a_burst_of_new_files_waits_for_memory(stack_of: StackOf, model_folder: Path) -> None:
    """Red if a request gets 503 although others will release memory, if two requests wait for each other's, or if what never fits waits."""
    stack = stack_of(model_folder, processor_arena_bytes=4 * MIB, api_arena_bytes=64 * MIB)  # for two requests
    noise = np.random.default_rng(0)
    files = [save(Image.fromarray(noise.integers(0, 256, (400, 400, 3), np.uint8)), "PNG") for _ in range(6)]  # 0.5 MB, as are pixels
    with ThreadPoolExecutor(32) as clients:
        answers = [clients.submit(stack.chat, content([files[i % 6], files[(i + 1) % 6]])) for i in range(32)]
        assert [answer.result().status_code for answer in answers] == [200] * 32
    refused = stack.chat(content(LARGE))
    assert refused.status_code == 413 and "--processor-arena-bytes" in refused.json()["error"]["message"]
    stack.recover()


def test_a_request_that_lacks_memory_until_its_deadline_is_a_503(stack_of: StackOf, model_folder: Path) -> None:
    stack = stack_of(model_folder, processor_arena_bytes=6 * MIB)
    inputs = stack.local.processor._intake.allocator.inputs
    held = inputs.alloc(inputs.size)
    refused = stack.chat(content(LARGE[:1]), timeout=1)
    assert refused.status_code == 503, refused.text
    inputs.free(held)
    stack.recover()
