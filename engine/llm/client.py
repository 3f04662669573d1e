"""`AsyncLLM` sends requests to a server that it starts, as a child process, on a Unix socket. `LLM` drives one in a thread."""

import asyncio
import contextlib
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import as_completed
from typing import Any, Literal

import aiohttp
import msgspec
from anyio.from_thread import start_blocking_portal
from tqdm import tqdm

from engine.launch.flags import read_flags
from engine.launch.process import ServerProcess
from engine.llm.inputs import CHAT, COMPLETIONS, EMBEDDINGS, Ask, listed, words_of
from engine.llm.outputs import RequestOutput
from engine.wire.config import UNIX_HOST
from engine.wire.params import UNSTREAMED

RETRY_S = 0.05
OURS = {"api_key": None, "api_key_file": None, "allowed_hosts": None, "root_path": "", "shutdown_timeout": 0}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
READ_BUFFER = 1 << 26  # half of the maximum document size
JSON = {"content-type": "application/json"}
MEMORY = "/dev/shm"  # a file system in memory
Params = Mapping[str, Any] | None
Errors = Literal["raise", "return"]
Results = Generator[tuple[int, RequestOutput], None, None]
Outputs = AsyncGenerator[RequestOutput, None]


class AsyncLLM:
    """`async with AsyncLLM(model=..., flags of engine.serve) as llm: async for output in llm.chat(messages)`.

    Requests raise ValueError with the message of the API, OSError for a missing file, and ChildDied when the engine has ended. Closing an
    iterator aborts its request. `fields` are those of `Ask`.
    """

    def __init__(self, model: str = "demo", **flags: Any):
        """Store the flags. Raises ValueError for a bad flag."""
        config, notes = read_flags(words_of({"log_level": "warning", "model": model, **flags, "host": UNIX_HOST}))
        for note in notes:
            warnings.warn(note, stacklevel=3)
        if config.dp != 1 or config.plan:
            raise ValueError("LLM does not support --dp and --plan: use engine.serve")
        self._places = asyncio.Semaphore(min(config.max_queued_requests, 4 * config.max_num_seqs))
        self._server = ServerProcess(msgspec.structs.replace(config, **OURS))
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "AsyncLLM":
        await self._server.start()
        connector, timeout = aiohttp.UnixConnector(self._server.path, limit=0), aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession("http://engine", connector=connector, timeout=timeout, read_bufsize=READ_BUFFER)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()
        if self._session is not None:
            await self._session.close()

    def chat(self, messages: Any, sampling_params: Params = None, **fields: Any) -> Outputs:
        """Yield the output again whenever it has grown."""
        return self._outputs(Ask(CHAT, messages, sampling_params, fields), is_streamed=True)

    def generate(self, prompt: Any, sampling_params: Params = None, **fields: Any) -> Outputs:
        """Continue a text or token ids; see `chat`."""
        return self._outputs(Ask(COMPLETIONS, prompt, sampling_params, fields), is_streamed=True)

    async def embed(self, prompt: Any, **fields: Any) -> RequestOutput:
        """Embed a text, token ids, or a conversation."""
        output = await self.answer(Ask(EMBEDDINGS, prompt, None, fields))
        if output.error is not None:
            raise output.error
        return output

    async def update_weights(self, source: Any, weight_version: str | None = None) -> None:
        """Replace all weights by those of a checkpoint's folder, or by tensors (a mapping from checkpoints' names), which are written to a
        private folder first. Requests wait meanwhile. Needs the flag `enable_weight_updates`. Raises ValueError if names, shapes or formats
        differ; nothing has changed then."""
        with contextlib.ExitStack() as stack:
            path = source
            if not isinstance(source, str | os.PathLike):
                has_space = os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > sum(tensor.nbytes for tensor in source.values())
                path = stack.enter_context(tempfile.TemporaryDirectory(prefix="weights-", dir=MEMORY if has_space else None))
                await asyncio.to_thread(write_tensors, source, os.path.join(path, "model.safetensors"))
            body = {"model_path": os.path.abspath(path), "weight_version": weight_version}
            async for _ in self._documents("/update_weights_from_disk", msgspec.json.encode(body)):
                pass

    async def answer(self, ask: Ask) -> RequestOutput:
        """Return the finished output, which has the ValueError or OSError of a failed request."""
        async with self._places:
            try:
                (output,) = [output async for output in self._outputs(ask)]
            except (ValueError, OSError) as error:
                return ask.output(error=error)
        return output

    async def _outputs(self, ask: Ask, is_streamed: bool = False) -> Outputs:
        """Yield the finished output or, if `is_streamed`, the output whenever it has grown."""
        body = await asyncio.to_thread(ask.body)
        body |= STREAM if is_streamed and all(body.get(name) is None for name in UNSTREAMED) else {}
        output = ask.output(body.get("n") or 1)
        async with contextlib.aclosing(self._documents(ask.path, msgspec.json.encode(body))) as documents:
            async for document in documents:
                choices = document.get("choices") or document.get("data", ())
                for choice in choices:
                    output.add(choice, document)
                if choices:
                    yield output

    async def _documents(self, path: str, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the document of a response, or of each event of a stream. Wait while the engine is full."""
        assert self._session is not None
        try:
            while True:
                error = None
                async with self._session.post(path, data=body, headers=JSON) as response:
                    async for line in response.content:  # a single line, or the events of a stream
                        if (text := line.removeprefix(b"data: ")).startswith(b"{"):
                            document = msgspec.json.decode(text)
                            if error := document.get("error"):
                                break
                            yield document
                if error is None:
                    return
                if error["code"] != "overloaded":
                    problem = ValueError(error["message"])
                    raise await self._server.lost(problem) if error["code"] == "shutting_down" else problem
                await asyncio.sleep(RETRY_S)
        except (aiohttp.ClientError, ConnectionError) as broken:
            raise await self._server.lost(broken) from None


class LLM:
    """`with LLM(model=..., flags of engine.serve) as llm: llm.chat(messages)`. Without `with`, the processes end with `close`, with the
    object or with the program.

    Lists are answered in their order. The first request that fails raises, as in AsyncLLM, and ends the others; with `errors="return"` it
    is the `error` of its output. `fields` are those of `Ask`.
    """

    def __init__(self, model: str = "demo", **flags: Any):
        """Start the engine and wait until it is ready. Raises ValueError or ChildDied."""
        self._engine = AsyncLLM(model, **flags)
        with contextlib.ExitStack() as stack:
            self._thread = stack.enter_context(start_blocking_portal(backend_options={"use_uvloop": True}))  # the parent of the processes
            stack.enter_context(self._thread.wrap_async_context_manager(self._engine))
            self.close: Callable[[], object] = weakref.finalize(self, stack.pop_all().close)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chat(
        self, messages: Any, sampling_params: Params = None, use_tqdm: bool = True, errors: Errors = "raise", **fields: Any
    ) -> list[RequestOutput]:
        """Answer a text or a conversation, or each of a list. Parts of messages may be PIL images, bytes or paths (`Path`) of pictures."""
        return self._all(_asks(CHAT, messages, sampling_params, fields), use_tqdm, errors)

    def generate(
        self, prompts: Any, sampling_params: Params = None, use_tqdm: bool = True, errors: Errors = "raise", **fields: Any
    ) -> list[RequestOutput]:
        """Continue a text, or token ids; or each of a list."""
        return self._all(_asks(COMPLETIONS, prompts, sampling_params, fields), use_tqdm, errors)

    def embed(self, prompts: Any, use_tqdm: bool = True, errors: Errors = "raise", **fields: Any) -> list[RequestOutput]:
        """Embed a text, token ids or a conversation; or each of a list."""
        return self._all(_asks(EMBEDDINGS, prompts, None, fields), use_tqdm, errors)

    def as_completed(self, messages: Any, sampling_params: Params = None, **fields: Any) -> Results:
        """Like `chat`, but yield the number of a conversation and its output, or its `error`, as soon as it is finished."""
        return self._results(_asks(CHAT, messages, sampling_params, fields))

    def update_weights(self, source: Any, weight_version: str | None = None) -> None:
        self._thread.call(self._engine.update_weights, source, weight_version)

    def _all(self, asks: list[Ask], use_tqdm: bool, errors: Errors) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        with contextlib.closing(self._results(asks)) as results:
            for _, output in tqdm(results, total=len(asks), disable=not use_tqdm, desc="Answers", unit="request"):
                if output.error is not None and errors == "raise":
                    raise output.error
                outputs.append(output)
        return sorted(outputs, key=lambda output: output.number)

    def _results(self, asks: list[Ask]) -> Results:
        """Iterate over results. Closing the iterator aborts the unfinished requests."""
        answers = [self._thread.start_task_soon(self._engine.answer, ask) for ask in asks]
        try:
            for answer in as_completed(answers):
                yield answer.result().number, answer.result()
        finally:
            for answer in answers:
                answer.cancel()


def _asks(path: str, prompts: Any, params: Params, fields: dict[str, Any]) -> list[Ask]:
    return [Ask(path, prompt, params, fields, number) for number, prompt in enumerate(listed(prompts))]


def write_tensors(tensors: Mapping[str, Any], path: str) -> None:
    """Write copies of torch tensors, of which some may be tied, to a safetensors file."""
    from safetensors.torch import save_file  # imports torch

    save_file({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, path)
