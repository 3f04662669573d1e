"""`AsyncLLM`: requests to a server of its own.

Ask ──▶ JSON ──▶ httpx on a Unix socket ──▶ engine.serve, a child process ─ ─ ▶ a document, or parts of a stream ──▶ RequestOutput
"""

import asyncio
import contextlib
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
import pybase64

from engine.launch.flags import read_flags
from engine.launch.process import ServerProcess
from engine.launch.unix import UnixClients
from engine.llm.inputs import CHAT, COMPLETIONS, Ask, embedding_of, words_of
from engine.llm.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from engine.llm.params import SamplingParams

RETRY_S = 0.05
OURS = {"api_key": None, "api_key_file": None, "allowed_hosts": None, "root_path": "", "shutdown_timeout": 0}
JSON = {"content-type": "application/json"}


class Refused(ValueError):
    """Error of the API: its message and code."""

    def __init__(self, error: dict[str, Any]):
        super().__init__(error["message"])
        self.code = error["code"]


class AsyncLLM:
    """`async with AsyncLLM(model=..., flags of engine.serve) as llm: async for output in llm.chat(messages)`.

    Requests raise ValueError with the message of the API, OSError for a missing file, and ChildDied when the engine has ended. Closing an
    iterator aborts its request. `fields` are further fields of the API.
    """

    def __init__(self, model: str = "demo", **flags: Any):
        """Store the flags. Raises ValueError for a bad flag."""
        config, notes = read_flags(words_of({"log_level": "warning", "model": model, **flags}))
        for note in notes:
            warnings.warn(note, stacklevel=3)
        if config.dp != 1 or config.plan:
            raise ValueError("an LLM is one engine: --dp and --plan are for engine.serve")
        self.num_places = min(config.max_queued_requests, 4 * config.max_num_seqs)
        self._server = ServerProcess(msgspec.structs.replace(config, **OURS))
        self._clients = UnixClients()

    async def __aenter__(self) -> "AsyncLLM":
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()
        await self._clients.close()

    def chat(self, messages: Any, sampling_params: SamplingParams | None = None, **fields: Any) -> AsyncIterator[RequestOutput]:
        """Yield the output again whenever it has grown."""
        return self._grow(Ask(CHAT, messages, sampling_params or SamplingParams(), fields))

    def generate(self, prompt: Any, sampling_params: SamplingParams | None = None, **fields: Any) -> AsyncIterator[RequestOutput]:
        """Continue a text or token ids, as `chat`."""
        return self._grow(Ask(COMPLETIONS, prompt, sampling_params or SamplingParams(), fields))

    async def embed(self, prompt: Any, **fields: Any) -> EmbeddingRequestOutput:
        """Embed a text, token ids, or a conversation."""
        (output,) = [output async for _, output in self.answers([embedding_of(prompt, fields)])]
        return output

    async def _grow(self, ask: Ask) -> AsyncIterator[RequestOutput]:
        async with contextlib.aclosing(self.answers([ask], is_streamed=True)) as answers:
            async for _, output in answers:
                yield output

    async def answers(self, asks: Sequence[Ask], is_streamed: bool = False) -> AsyncGenerator[tuple[int, Any], None]:
        """Send one request for prompts of equal parameters. Yield the position and the output of each when it is finished or, if
        `is_streamed`, has grown."""
        path, body = asks[0].path, asks[0].value() if asks[0].is_text else await asyncio.to_thread(asks[0].value)
        if len(asks) > 1:
            path, field = ("/v1/chat/completions/batch", "messages") if path == CHAT else (path, "prompt")
            body[field] = [ask.value()[field] for ask in asks]
        if (is_streamed or len(asks) > 1) and body.get("prompt_logprobs") is None:
            body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        n = body.get("n") or 1
        outputs = [RequestOutput(ask.prompt, [CompletionOutput(index) for index in range(n)]) for ask in asks]
        async with contextlib.aclosing(self._documents(path, msgspec.json.encode(body))) as documents:
            async for document in documents:
                for entry in document.get("data", ()):
                    vector = np.frombuffer(pybase64.b64decode(entry["embedding"]), np.float32).tolist()
                    yield 0, EmbeddingRequestOutput(EmbeddingOutput(vector), document["usage"]["prompt_tokens"])
                for choice in document.get("choices", ()):
                    output = outputs[position := choice["index"] // n]
                    output.add(choice, document)
                    if is_streamed or output.finished:
                        yield position, output

    async def _documents(self, path: str, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the document of a response, or of each event of a stream. Wait while the engine is full."""
        async with self._clients.client(self._server.path) as client:
            while True:
                try:
                    async with client.stream("POST", path, content=body, headers=JSON) as response:
                        rest = b""
                        async for data in response.aiter_raw():
                            *events, rest = (rest + data).split(b"\n\n")  # text may hold any other end of a line
                            for event in events:
                                if event.startswith(b"data: {"):
                                    yield _checked(event[6:])
                        if rest:
                            yield _checked(rest)
                    break
                except (Refused, httpx.TransportError) as problem:
                    if not isinstance(problem, Refused) or problem.code == "shutting_down":
                        raise await self._server.lost(problem) from None
                    if problem.code != "overloaded":
                        raise
                await asyncio.sleep(RETRY_S)


def _checked(data: bytes) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(data)
    if error := document.get("error"):
        raise Refused(error)
    return document
