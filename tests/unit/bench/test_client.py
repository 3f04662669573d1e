"""The benchmarks' client against a small server: bodies arrive whole, buffers are kept but never shared, times add up."""

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.breakdown import breakdown, part_columns, ttft_figures
from bench.client import PIECE_BYTES, SHORT_WORDS, Answer, ChatClient, chat_body, user_message
from bench.load import make_bodies

MIB = 1 << 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def client_of(handler: Handler) -> AsyncIterator[ChatClient]:
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/chat/completions", handler)
    async with TestServer(app) as server, ChatClient(str(server.make_url("/"))) as client:
        yield client


async def stream(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(data + b"data: [DONE]\n\n")
    return response


class Echo:
    def __init__(self, expected: int = 1) -> None:
        self.expected = expected
        self.texts = []
        self._all_here = asyncio.Event()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        assert request.content_length is not None and "Transfer-Encoding" not in request.headers
        text = (await request.json())["messages"][0]["content"][0]["text"]
        self.texts.append(text)
        if len(self.texts) >= self.expected:
            self._all_here.set()
        await self._all_here.wait()
        return await stream(request, b'data: {"choices": [{"delta": {"content": "%d"}}]}\n\n' % len(text))


def body(text: str) -> dict[str, object]:
    return chat_body("model", [user_message([], text)], 1)


async def test_a_body_arrives_whole() -> None:
    for num_bytes in (1, PIECE_BYTES - 1, PIECE_BYTES, 3 * MIB, 20, 5 * MIB + 1):
        async with client_of(Echo().chat) as client:
            answer = await client.chat(body("x" * num_bytes))
        assert answer.error is None and answer.text == str(num_bytes)
        assert answer.started < answer.sent < answer.written < answer.token_times[0]


THINKING = (b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n', *(
    b'data: {"choices": [{"delta": %s}]}\n\n' % delta for delta in (
        b'{"reasoning": ""}', b'{"reasoning": "so"}', b'{"reasoning_content": " it"}', b'{"reasoning": " is", "reasoning_content": " is"}',
        b'{"content": ""}', b'{"content": "yes"}', b"{}",
    )
))  # fmt: skip


async def test_thoughts_are_timed_but_not_the_answer() -> None:
    async def think(request: web.Request) -> web.StreamResponse:
        await request.read()
        return await stream(request, b"".join(THINKING))

    async with client_of(think) as client:
        answer = await client.chat(body("x"))
    assert (len(answer.token_times), answer.text, answer.error) == (4, "yes", None)


async def test_requests_at_once_do_not_share_a_buffer() -> None:
    echo = Echo(expected=8)
    texts = [chr(ord("a") + i) * (MIB + i) for i in range(echo.expected)]
    async with client_of(echo.chat) as client:
        answers = await asyncio.gather(*(client.chat(body(text)) for text in texts))
        assert [answer.text for answer in answers] == [str(len(text)) for text in texts]
        assert sorted(echo.texts) == texts
        assert len({id(buffer) for buffer in client._uploads._free}) == echo.expected


async def test_a_buffer_that_was_not_read_to_its_end_is_not_used_again() -> None:
    """The transport may still send it: the answer comes before the body was read, as from a gateway."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "too large"}, status=413)

    async with client_of(refuse) as client:
        answer = await client.chat(body("x" * 32 * MIB))
        assert answer.error is not None and not answer.written and not client._uploads._free


def test_the_parts_add_up() -> None:
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
    answers = [Answer(started=0.0, sent=0.001 * i, written=0.002 * i, token_times=[0.01 * i]) for i in (3, 1, 2)]
    figures = ttft_figures(answers)
    assert figures["ttft_ms"] == 20.0 and figures["parts_ms"] == {"client_ms": 2.0, "transfer_ms": 2.0, "rest_ms": 16.0}
    assert part_columns([figures, {"error": "503"}]) == (["client", "transfer", "rest"], [["2.0", "2.0", "16.0"], ["", "", ""]])


def test_loads_of_other_seeds_share_no_text() -> None:
    args = Namespace(images=0, resolution="720p", content="smooth", input_tokens=9, output_tokens=1, fields={})
    assert len({str(body["messages"]) for seed in range(3) for body in make_bodies(args, "", 20, seed, SHORT_WORDS)}) == 60
