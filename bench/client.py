"""Client of any OpenAI-compatible URL that times streamed chat requests token by token."""

import argparse
import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from string import ascii_lowercase
from typing import Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter

READ_BUFFER = 1 << 20
PIECE_BYTES = 1 << 18  # bytes of an upload per write; aiohttp copies the first piece to join it with the headers
SHORT_WORDS = [" " + "".join(pair) for pair in product(ascii_lowercase, repeat=2)]  # about a token each
NUM_IDS = 4096, 100_000  # token ids whose words are used, of the first ones of the vocabulary
HEALTH_PAUSE_S = 0.05


@dataclass(slots=True)
class Answer:
    """Answer as seen by a client. Times are clock readings."""

    started: float = 0.0  # before serialisation
    sent: float = 0.0  # body serialised, before it is written
    written: float = 0.0  # last byte of the body passed to the kernel
    token_times: list[float] = field(default_factory=list)  # arrival of each chunk with reasoning or answer text
    finished: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)  # stages reported by this project's server
    error: str | None = None
    text: str = ""  # without the reasoning

    @property
    def ttft(self) -> float:
        """Return the time of the first non-empty text, including the client's serialisation."""
        return self.token_times[0] - self.started

    @property
    def ttft_sent(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def num_tokens(self) -> int:
        return int(self.usage.get("completion_tokens", len(self.token_times)))

    @property
    def tpot(self) -> float:
        """Return the mean seconds per token after the first."""
        return (self.finished - self.token_times[0]) / max(1, self.num_tokens - 1)

    @property
    def latencies(self) -> list[float]:
        return [second - first for first, second in pairwise(self.token_times)]


def succeeded(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers without an error. SystemExit if there are none."""
    good = [answer for answer in answers if answer.error is None]
    if not good:
        raise SystemExit(f"every request failed: {answers[0].error}")
    return good


def text_of(num_tokens: int, salt: int, words: Sequence[str] = SHORT_WORDS) -> str:
    """Return `num_tokens` random words, others for every salt: equal prompts would share prefixes and choose the same experts."""
    return "".join(random.Random(salt).choices(words, k=max(1, num_tokens)))


def user_message(uris: list[str], text: str, kind: str = "image") -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": f"{kind}_url", f"{kind}_url": {"url": uri}} for uri in uris]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def chat_body(model: str, messages: list[dict[str, Any]], max_tokens: int, temperature: float = 0) -> dict[str, Any]:
    """Return a streamed request of fixed length with usage; `timings` requests stages and is ignored by other servers."""
    return {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timings": True,
    }


class Upload(aiohttp.Payload):
    """Serialised body. aiohttp would copy it to join it with the headers, and each new buffer of many megabytes costs page faults. The
    buffer must not change until it is written."""

    def __init__(self, buffer: bytearray):
        super().__init__(buffer, content_type="application/json")
        self._size = len(buffer)
        self.buffer = buffer
        self.written = 0.0  # clock reading when the kernel had the last byte; the buffer is not read after that

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Pass the pieces to the transport, each after the kernel has taken the previous one."""
        if writer.transport is not None:  # None: the connection is lost, as `write` reports
            writer.transport.set_write_buffer_limits(1)  # `drain` then waits for the kernel (with 0, uvloop's TLS would wait forever)
        body = memoryview(self.buffer)
        for start in range(0, len(body), PIECE_BYTES):
            await writer.write(body[start : start + PIECE_BYTES])
        await writer.drain()
        self.written = time.perf_counter()

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.buffer.decode(encoding, errors)


class Uploads:
    """Pool of unused buffers."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._encoder = msgspec.json.Encoder()

    def encode(self, body: dict[str, Any]) -> Upload:
        """Return the body as JSON in a buffer of its own until `give_back`."""
        buffer = self._free.pop() if self._free else bytearray()
        self._encoder.encode_into(body, buffer)
        return Upload(buffer)

    def give_back(self, upload: Upload) -> None:
        """Take the buffer back, unless the transport may still use it: the server answered before reading everything."""
        if upload.written:
            self._free.append(upload.buffer)


class ChatClient:
    """Connection pool to one server, an async context manager. Paths of requests through `session` are relative: `v1/models`."""

    def __init__(self, url: str, api_key: str | None = None):
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.session = aiohttp.ClientSession(
            url.rstrip("/").removesuffix("/v1") + "/",
            timeout=aiohttp.ClientTimeout(total=3600),
            headers=headers,
            read_bufsize=READ_BUFFER,
            connector=aiohttp.TCPConnector(limit=0),
        )
        self.words: Sequence[str] = SHORT_WORDS  # of `text_of`
        self._uploads = Uploads()

    async def __aenter__(self) -> "ChatClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def model(self) -> str:
        async with self.session.get("v1/models") as response:
            return str((await response.json())["data"][0]["id"])

    async def learn_words(self, model: str) -> None:
        """Take words from the server's vocabulary that are one token each, by routes that vLLM and SGLang have, too; without these routes
        keep SHORT_WORDS."""
        candidates = await self._words(model, random.Random(0).sample(range(NUM_IDS[1]), NUM_IDS[0]))
        words = await self._words(model, await self._tokens(model, "".join(candidates))) if candidates else []
        self.words = words or SHORT_WORDS

    async def _words(self, model: str, ids: Sequence[int]) -> list[str]:
        newline = await self._tokens(model, "\n")
        body = {"model": model, "tokens": [each for token in ids for each in (token, *newline)]}
        async with self.session.post("detokenize", json=body) as response:
            found = await response.json() if newline and response.status == 200 else {}
        return re.findall(r"^ [A-Za-z]{2,}$", found.get("prompt", found.get("text", "")), re.MULTILINE)

    async def _tokens(self, model: str, text: str) -> list[int]:
        async with self.session.post("tokenize", json={"model": model, "prompt": text}) as response:
            return list((await response.json())["tokens"]) if response.status == 200 else []

    async def metrics(self, *names: str) -> dict[str, float]:
        """Return values of the server's /metrics, summed over their labels."""
        async with self.session.get("metrics") as response:
            text = await response.text()
        return {name: sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))) for name in names}

    async def chat(self, body: dict[str, Any]) -> Answer:
        """Send one request and read its stream. An error response or a broken connection sets `Answer.error`."""
        answer = Answer(started=time.perf_counter())
        upload = self._uploads.encode(body)
        answer.sent = time.perf_counter()
        try:
            async with self.session.post("v1/chat/completions", data=upload) as response:
                if response.status != 200:
                    answer.error = f"{response.status}: {(await response.text())[:300]}"
                    return answer
                async for line in response.content:
                    self._take(answer, line)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            answer.written = upload.written
            self._uploads.give_back(upload)
        answer.finished = answer.token_times[-1] if answer.token_times else time.perf_counter()
        if not answer.token_times and answer.error is None:
            answer.error = "no text was received"
        return answer

    @staticmethod
    def _take(answer: Answer, line: bytes) -> None:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            return
        now = time.perf_counter()
        chunk = json.loads(line[6:])
        if "error" in chunk:
            answer.error = str(chunk["error"])[:300]
        answer.usage = chunk.get("usage") or answer.usage
        answer.timings = chunk.get("timings") or answer.timings
        delta = chunk["choices"][0].get("delta", {}) if chunk.get("choices") else {}
        if delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content"):  # servers use one of two names for reasoning
            answer.token_times.append(now)
        answer.text += delta.get("content") or ""


@asynccontextmanager
async def served(args: argparse.Namespace) -> AsyncIterator[tuple[ChatClient, str]]:
    async with ChatClient(args.url, args.api_key) as client:
        model = args.model or await client.model()
        await client.learn_words(model.partition(",")[0])
        yield client, model


async def watch_health(url: str, seconds: list[float]) -> None:
    """Append the duration of each request to `/health`, infinity if the status is not 200, until the task is cancelled."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while True:
            started = time.perf_counter()
            async with session.get(f"{url}/health") as response:
                seconds.append(time.perf_counter() - started if response.status == 200 else float("inf"))
            await asyncio.sleep(HEALTH_PAUSE_S)
