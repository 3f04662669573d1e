"""The benchmarks' client against a small server: bodies arrive whole, buffers are kept but never shared, times add up."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.breakdown import breakdown, part_cells, part_names, ttft_figures
from bench.client import Answer, ChatClient, chat_body, user_message
from bench.upload import PIECE_BYTES

MIB = 1 << 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Echo:
    """Answers with the length of the text that came; holds answers back until `expected` requests are there."""

    def __init__(self) -> None:
        self.expected = 1
        self.texts: list[str] = []
        self._all_here = asyncio.Event()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        assert request.content_length is not None and "Transfer-Encoding" not in request.headers
        text = (await request.json())["messages"][0]["content"][0]["text"]
        self.texts.append(text)
        if len(self.texts) >= self.expected:
            self._all_here.set()
        await self._all_here.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"delta": {"content": "%d"}}]}\n\ndata: [DONE]\n\n' % len(text))
        return response


async def refuse(request: web.Request) -> web.StreamResponse:
    """An answer before the body was read, as a gateway gives it."""
    return web.json_response({"error": "too large"}, status=413)


async def serve(handler: Handler) -> AsyncIterator[str]:
    app = web.Application(client_max_size=64 * MIB)
    app.router.add_post("/v1/chat/completions", handler)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def url(echo: Echo) -> AsyncIterator[str]:
    async for address in serve(echo.chat):
        yield address


@pytest.fixture
async def refusing_url() -> AsyncIterator[str]:
    async for address in serve(refuse):
        yield address


def body(text: str) -> dict[str, object]:
    return chat_body("model", [user_message([], text)], 1)


@pytest.mark.parametrize("num_bytes", [1, PIECE_BYTES - 1, PIECE_BYTES, 3 * MIB, 20, 5 * MIB + 1])
async def test_a_body_arrives_whole(echo: Echo, url: str, num_bytes: int) -> None:
    """Red if a piece is lost or repeated, or the length is not declared."""
    async with ChatClient(url) as client:
        answer = await client.chat(body("x" * num_bytes))
    assert answer.error is None and answer.text == str(num_bytes)
    assert answer.started < answer.sent < answer.written < answer.token_times[0]


THINKING = (b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n', *(
    b'data: {"choices": [{"delta": %s}]}\n\n' % delta for delta in (
        b'{"reasoning": ""}', b'{"reasoning": "so"}', b'{"reasoning_content": " it"}', b'{"reasoning": " is", "reasoning_content": " is"}',
        b'{"content": ""}', b'{"content": "yes"}', b"{}",
    )
))  # fmt: skip


async def think(request: web.Request) -> web.StreamResponse:
    """An answer behind thoughts, named as several servers name them."""
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"".join(THINKING) + b"data: [DONE]\n\n")
    return response


@pytest.fixture
async def thinking_url() -> AsyncIterator[str]:
    async for address in serve(think):
        yield address


async def test_thoughts_are_timed_but_not_the_answer(thinking_url: str) -> None:
    """Red if the first token of a model that thinks is the first one of its answer, or if thoughts are taken for the answer."""
    async with ChatClient(thinking_url) as client:
        answer = await client.chat(body("x"))
    assert (len(answer.token_times), answer.text, answer.error) == (4, "yes", None)


async def test_a_buffer_is_kept_for_the_next_request(echo: Echo, url: str) -> None:
    """Red if every body gets fresh memory, or what is left of a longer one before it is sent too."""
    async with ChatClient(url) as client:
        assert [(await client.chat(body("x" * size))).text for size in (2 * MIB, 7, MIB)] == [str(2 * MIB), "7", str(MIB)]
        assert len(client._uploads._free) == 1


async def test_requests_at_once_do_not_share_a_buffer(echo: Echo, url: str) -> None:
    """Red if a body is overwritten by that of a request beside it."""
    echo.expected = 8
    texts = [chr(ord("a") + i) * (MIB + i) for i in range(echo.expected)]
    async with ChatClient(url) as client:
        answers = await asyncio.gather(*(client.chat(body(text)) for text in texts))
        assert [answer.text for answer in answers] == [str(len(text)) for text in texts]
        assert sorted(echo.texts) == texts
        assert len({id(buffer) for buffer in client._uploads._free}) == echo.expected


async def test_a_buffer_that_was_not_read_to_its_end_is_not_used_again(refusing_url: str) -> None:
    """Red if the next body is written over one that the transport still sends."""
    async with ChatClient(refusing_url) as client:
        answer = await client.chat(body("x" * 32 * MIB))
        assert answer.error is not None and not answer.written
        assert not client._uploads._free


async def test_a_server_that_is_not_there_is_an_error_of_the_answer(unused_tcp_port: int) -> None:
    """Red if the client raises where it used to report."""
    async with ChatClient(f"http://127.0.0.1:{unused_tcp_port}") as client:
        answer = await client.chat(body("x"))
    assert answer.error is not None and answer.error.startswith("ClientConnectorError")


def test_the_parts_add_up() -> None:
    """Red if a part is counted twice or left out: what the client sees of the transfer overlaps what the server sees of it."""
    stages = {"prepare_ms": 4.0, "queue_ms": 1.0, "launch_ms": 0.5, "prefill_ms": 8.0, "sample_ms": 0.25, "reply_ms": 0.25}
    timings = {"receive_ms": 10.0, **stages, "device_forward_ms": 7.0, "images_encoded": 2}
    answer = Answer(started=1.0, sent=1.008, written=1.019, token_times=[1.034], timings=timings)
    parts = breakdown(answer)
    assert parts.pop("rest_ms") == 1.0
    assert parts.pop("client_ms") == 8.0 and parts.pop("transfer_ms") == 11.0
    assert parts == stages
    answer.written = 1.009
    assert breakdown(answer)["transfer_ms"] == 10.0


def test_the_parts_are_those_of_the_answer_in_the_middle() -> None:
    """Red if the figures of a point belong to different requests, or a server that tells no stages cannot be measured."""
    answers = [Answer(started=0.0, sent=0.001 * i, written=0.002 * i, token_times=[0.01 * i]) for i in (3, 1, 2)]
    figures = ttft_figures(answers)
    assert figures["ttft_ms"] == 20.0 and figures["parts_ms"] == {"client_ms": 2.0, "transfer_ms": 2.0, "rest_ms": 16.0}
    points = [figures, {"error": "503"}]
    assert part_names(points) == ["client", "transfer", "rest"]
    assert [part_cells(point, ["client", "prepare"]) for point in points] == [["2.0", ""], ["", ""]]
