"""`AsyncLLM`: requests to a server of its own.

Ask ──▶ JSON ──▶ httpx on a Unix socket ──▶ engine.serve, a child process ─ ─ ▶ a document, or parts of a stream ──▶ RequestOutput
"""

import asyncio
import contextlib
import os
import warnings
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import groupby
from typing import Any

import httpx
import msgspec

from engine.launch.config import UNIX_HOST
from engine.launch.flags import read_flags
from engine.launch.process import ServerProcess
from engine.launch.unix import UnixClients
from engine.llm.inputs import CHAT, COMPLETIONS, EMBEDDINGS, Ask, words_of
from engine.llm.outputs import EmbeddingRequestOutput, RequestOutput
from engine.llm.params import SamplingParams
from engine.wire.updates import Drain

MAX_BATCH = 16  # texts in one request
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
    iterator aborts its request. `fields` are further fields of the API, and `lora`, the name of an adapter.
    """

    def __init__(self, model: str = "demo", **flags: Any):
        """Store the flags. Raises ValueError for a bad flag."""
        config, notes = read_flags(words_of({"log_level": "warning", "model": model, **flags, "host": UNIX_HOST}))
        for note in notes:
            warnings.warn(note, stacklevel=3)
        if config.dp != 1 or config.plan:
            raise ValueError("an LLM is one engine: --dp and --plan are for engine.serve")
        self._num_places = min(config.max_queued_requests, 4 * config.max_num_seqs)
        self._server = ServerProcess(msgspec.structs.replace(config, **OURS))
        self._clients = UnixClients()

    async def __aenter__(self) -> "AsyncLLM":
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()
        await self._clients.close()

    def chat(self, messages: Any, sampling_params: SamplingParams | None = None, **fields: Any) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output again whenever it has grown."""
        return self._answers([Ask(CHAT, messages, sampling_params or SamplingParams(), fields)], is_streamed=True)

    def generate(self, prompt: Any, sampling_params: SamplingParams | None = None, **fields: Any) -> AsyncGenerator[RequestOutput, None]:
        """Continue a text or token ids, as `chat`."""
        return self._answers([Ask(COMPLETIONS, prompt, sampling_params or SamplingParams(), fields)], is_streamed=True)

    async def embed(self, prompt: Any, **fields: Any) -> EmbeddingRequestOutput:
        """Embed a text, token ids, or a conversation."""
        (output,) = [output async for output in self._answers([Ask(EMBEDDINGS, prompt, None, fields)])]
        return output

    async def pause(self, mode: Drain = "abort") -> None:
        """Start no further requests until `resume`. Running ones end ("abort"), finish ("wait") or are continued later ("keep")."""
        await self._order("/pause", {"mode": mode})

    async def resume(self) -> None:
        await self._order("/resume", {})

    async def update_weights(self, source: Any, weight_version: str | None = None) -> None:
        """Replace weights by those of a checkpoint's folder, or by tensors (a mapping from names in checkpoints). Requests wait meanwhile.
        Needs the flag `enable_weight_updates`. Raises ValueError if names, shapes or formats differ; nothing has changed then."""
        version = {"weight_version": weight_version}
        if isinstance(source, str | os.PathLike):
            await self._order("/update_weights_from_disk", {"model_path": os.path.abspath(source), **version})
            return
        from engine.updates.memory import shared  # imports torch

        with contextlib.ExitStack() as stack:
            specs = await asyncio.to_thread(stack.enter_context, shared(source))
            tensors = [msgspec.to_builtins(spec) for spec in specs]
            await self._order("/update_weights_from_tensor", {"named_tensors": tensors, **version})

    async def _order(self, path: str, body: dict[str, Any]) -> None:
        async for _ in self._documents(path, msgspec.json.encode(body)):
            pass

    async def answer_all(self, asks: Sequence[Ask], note: Callable[[Any], object]) -> None:
        """Call `note` with each output as it is finished. A request's ValueError or OSError is stored in its output."""
        size = max(1, min(MAX_BATCH, self._num_places // MAX_BATCH))
        alike = [list(group) for _, group in groupby(asks, key=lambda ask: ask.group)]
        batches = [group[start : start + size] for group in alike for start in range(0, len(group), size)]

        async def work() -> None:
            while batches:
                batch = batches.pop(0)
                left = {ask.number: ask for ask in batch}
                try:
                    async for output in self._answers(batch):
                        del left[output.number]
                        note(output)
                except (ValueError, OSError) as error:
                    if len(batch) == 1:
                        note(batch[0].output(error=error))
                    else:  # one is bad: which?
                        batches.extend([ask] for ask in left.values())

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(batches), self._num_places // size)):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answers(self, asks: Sequence[Ask], is_streamed: bool = False) -> AsyncGenerator[Any, None]:
        """Send one request for prompts of a group. Yield the output of each when it is finished or, if `is_streamed`, has grown."""
        path, body = asks[0].path, asks[0].value() if asks[0].is_text else await asyncio.to_thread(asks[0].value)
        if len(asks) > 1:
            path, field = ("/v1/chat/completions/batch", "messages") if path == CHAT else (path, "prompt")
            body[field] = [ask.value()[field] for ask in asks]
        if (is_streamed or len(asks) > 1) and body.get("prompt_logprobs") is None:
            body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        outputs = [ask.output(n := body.get("n") or 1) for ask in asks]
        async with contextlib.aclosing(self._documents(path, msgspec.json.encode(body, enc_hook=_schema_of))) as documents:
            async for document in documents:
                for choice in document.get("choices") or document.get("data", ()):
                    output = outputs[choice["index"] // n]
                    output.add(choice, document)
                    if is_streamed or output.finished:
                        yield output

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
                    return
                except (Refused, httpx.TransportError) as problem:
                    if not isinstance(problem, Refused) or problem.code == "shutting_down":
                        raise await self._server.lost(problem) from None
                    if problem.code != "overloaded":
                        raise
                await asyncio.sleep(RETRY_S)


def _schema_of(model: Any) -> Any:
    """Return the schema of a pydantic class in a body. Raises ValueError for other values that JSON does not have."""
    if not hasattr(model, "model_json_schema"):
        raise ValueError(f"a request cannot hold a {type(model).__name__}")
    return model.model_json_schema()


def _checked(data: bytes) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(data)
    if error := document.get("error"):
        raise Refused(error)
    return document
