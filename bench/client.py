"""Client of any OpenAI-compatible URL that times streamed chat requests token by token."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.upload import Uploads

READ_BUFFER = 1 << 20
WORD = " the"
HEALTH_PAUSE_S = 0.05


@dataclass(slots=True)
class Answer:
    """Answer as seen by a client. Times are seconds after its start; `started` (before serialisation) and `sent` are clock readings."""

    started: float = 0.0
    sent: float = 0.0  # body serialised, before it is written
    written: float = 0.0  # its last byte passed to the kernel
    token_times: list[float] = field(default_factory=list)  # clock readings of chunks with text, of the thoughts or the answer
    finished: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)  # stages reported by this project's server
    error: str | None = None
    text: str = ""  # without the thoughts

    @property
    def ttft(self) -> float:
        """Return the time of the first non-empty text, including the client's serialisation."""
        return self.token_times[0] - self.started

    @property
    def ttft_sent(self) -> float:
        """Return the time of the first non-empty text after serialisation."""
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
        """Return the seconds between consecutive texts."""
        return [second - first for first, second in zip(self.token_times, self.token_times[1:], strict=False)]


def text_of(num_tokens: int, salt: int) -> str:
    """Return text of about `num_tokens` tokens, different for every salt so that no prefix is shared."""
    head = f"Request {salt}:"
    return head + WORD * max(1, num_tokens - 8)


def user_message(uris: list[str], text: str) -> dict[str, Any]:
    """Return a message with images, then the text."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def chat_body(model: str, messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """Return a greedy, streamed request of fixed length with usage; `timings` requests stages and is ignored by other servers."""
    return {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timings": True,
    }


class ChatClient:
    """Connection pool to one server, an async context manager."""

    def __init__(self, url: str, api_key: str | None = None):
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._base = url.rstrip("/").removesuffix("/v1")
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=3600), headers=headers, read_bufsize=READ_BUFFER, connector=aiohttp.TCPConnector(limit=0)
        )
        self._uploads = Uploads()

    async def __aenter__(self) -> "ChatClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self) -> str:
        """Return the first model that the server lists."""
        async with self._session.get(f"{self._base}/v1/models") as response:
            return str((await response.json())["data"][0]["id"])

    async def version(self) -> dict[str, Any]:
        """Return the server's /version, or an empty dictionary."""
        async with self._session.get(f"{self._base}/version") as response:
            return dict(await response.json()) if response.status == 200 else {}

    async def metrics(self) -> str:
        """Return the server's /metrics."""
        async with self._session.get(f"{self._base}/metrics") as response:
            return await response.text()

    async def chat(self, body: dict[str, Any]) -> Answer:
        """Send one request and read its stream. An error response or a broken connection sets `Answer.error`."""
        answer = Answer(started=time.perf_counter())
        upload = self._uploads.encode(body)
        answer.sent = time.perf_counter()
        try:
            async with self._session.post(f"{self._base}/v1/chat/completions", data=upload) as response:
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
            answer.error = "no text came"
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
        if delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content"):  # two names of thoughts are in use
            answer.token_times.append(now)
        answer.text += delta.get("content") or ""


async def watch_health(url: str, seconds: list[float]) -> None:
    """Append the duration of each request to `/health`, infinity if the status is not 200, until the task is cancelled."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while True:
            started = time.perf_counter()
            async with session.get(f"{url}/health") as response:
                seconds.append(time.perf_counter() - started if response.status == 200 else float("inf"))
            await asyncio.sleep(HEALTH_PAUSE_S)
