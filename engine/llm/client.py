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
from typing import Any

import aiohttp
import msgspec
from anyio.from_thread import start_blocking_portal

from engine.launch.flags import read_flags, words_of
from engine.launch.process import ServerProcess
from engine.llm.bodies import CHAT, COMPLETIONS, EMBEDDINGS, CompletionOutput, RequestOutput, body_of, listed
from engine.wire.config import UNIX_HOST

RETRY_S = 0.05
OURS = {"api_key": None, "api_key_file": None, "allowed_hosts": None, "root_path": "", "shutdown_timeout": 0}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
READ_BUFFER = 1 << 26  # half of the maximum document size
JSON = {"content-type": "application/json"}
MEMORY = "/dev/shm"  # a file system in memory
Fields = dict[str, Any]
Params = Mapping[str, Any] | None
Results = Generator[tuple[int, RequestOutput], None, None]
Outputs = AsyncGenerator[RequestOutput, None]


class AsyncLLM:
    """`async with AsyncLLM(model=..., flags of engine.serve) as llm: async for output in llm.chat(messages)`. Requests raise ValueError
    with the API's message, OSError for a missing file, and ChildDied when the engine has ended. Closing an iterator aborts its request.
    `fields` are those of `body_of`."""

    def __init__(self, model: str = "demo", **flags: Any):
        """Store the flags. Raises ValueError for a bad flag."""
        config, notes = read_flags(words_of({"log_level": "warning", "model": model, **flags, "host": UNIX_HOST}))
        for note in notes:
            warnings.warn(note, stacklevel=3)
        if config.dp != 1:
            raise ValueError("LLM does not support --dp: use engine.serve")
        self._places = asyncio.Semaphore(min(config.max_queued_requests, 4 * config.max_num_seqs))
        self._server = ServerProcess(msgspec.structs.replace(config, **OURS))

    async def __aenter__(self) -> "AsyncLLM":
        await self._server.start()
        connector, timeout = aiohttp.UnixConnector(self._server.path, limit=0), aiohttp.ClientTimeout()
        self._session = aiohttp.ClientSession("http://engine", connector=connector, timeout=timeout, read_bufsize=READ_BUFFER, headers=JSON)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()
        await self._session.close()

    def chat(self, messages: Any, sampling_params: Params = None, **fields: Any) -> Outputs:
        """Yield the output again whenever it has grown; with `stream=False`, once."""
        return self._outputs(CHAT, messages, sampling_params, STREAM | fields)

    def generate(self, prompt: Any, sampling_params: Params = None, **fields: Any) -> Outputs:
        """Continue a text or token ids; see `chat`."""
        return self._outputs(COMPLETIONS, prompt, sampling_params, STREAM | fields)

    async def embed(self, prompt: Any, **fields: Any) -> RequestOutput:
        """Embed a text, token ids, or a conversation."""
        return await self.answer(EMBEDDINGS, prompt, None, fields)

    async def update_weights(self, source: Any) -> None:
        """Replace all weights by those of a checkpoint's folder, or by tensors (a mapping from checkpoints' names), which are written to
        a private folder in memory first. Requests wait meanwhile. Needs the flag `enable_weight_updates`. Raises ValueError if names,
        shapes or formats differ; nothing has changed then."""
        if isinstance(source, Mapping):
            has_space = shutil.disk_usage(MEMORY).free > sum(tensor.nbytes for tensor in source.values())
            with tempfile.TemporaryDirectory(prefix="weights-", dir=MEMORY if has_space else None) as folder:
                await asyncio.to_thread(write_tensors, source, f"{folder}/model.safetensors")
                return await self.update_weights(folder)
        body = msgspec.json.encode({"model_path": os.path.abspath(source)})
        async for _ in self._documents("/update_weights_from_disk", body):
            pass

    async def answer(self, path: str, prompt: Any, params: Params, fields: Fields) -> RequestOutput:
        async with self._places:
            (output,) = [output async for output in self._outputs(path, prompt, params, fields)]
        return output

    async def _outputs(self, path: str, prompt: Any, params: Params, fields: Fields) -> Outputs:
        body = await asyncio.to_thread(body_of, path, prompt, params, fields)
        output = RequestOutput(prompt, [CompletionOutput(index) for index in range(body.get("n") or 1)])
        async with contextlib.aclosing(self._documents(path, msgspec.json.encode(body))) as documents:
            async for document in documents:
                choices = document.get("choices") or document.get("data", ())
                for choice in choices:
                    output.add(choice, document)
                if choices:
                    yield output

    async def _documents(self, path: str, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the document of a response, or of each event of a stream. Wait while the engine is full."""
        try:
            while True:
                async with self._session.post(path, data=body) as response:
                    async for line in response.content:  # a single line, or the events of a stream
                        if (text := line.removeprefix(b"data: ")).startswith(b"{"):
                            document = msgspec.json.decode(text)
                            if error := document.get("error"):
                                break
                            yield document
                    else:
                        return
                if error["code"] != "overloaded":
                    problem = ValueError(error["message"])
                    raise await self._server.lost(problem) if error["code"] == "shutting_down" else problem
                await asyncio.sleep(RETRY_S)
        except (aiohttp.ClientError, ConnectionError) as broken:
            raise await self._server.lost(broken) from None


class LLM:
    """`with LLM(model=..., flags of engine.serve) as llm: llm.chat(messages)`. Without `with`, the processes end with `close`, with the
    object or with the program. Lists are answered in their order. The first request that fails raises, as in AsyncLLM, and ends the others;
    with `errors="return"` it is the `error` of its output. `fields` are those of `body_of`."""

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

    def chat(self, messages: Any, sampling_params: Params = None, **fields: Any) -> list[RequestOutput]:
        """Answer a text or a conversation, or each of a list. Parts of messages may be PIL images, bytes or paths (`Path`) of pictures."""
        return self._all(CHAT, messages, sampling_params, **fields)

    def generate(self, prompts: Any, sampling_params: Params = None, **fields: Any) -> list[RequestOutput]:
        """Continue a text, or token ids; or each of a list."""
        return self._all(COMPLETIONS, prompts, sampling_params, **fields)

    def embed(self, prompts: Any, **fields: Any) -> list[RequestOutput]:
        """Embed a text, token ids or a conversation; or each of a list."""
        return self._all(EMBEDDINGS, prompts, None, **fields)

    def as_completed(self, messages: Any, sampling_params: Params = None, **fields: Any) -> Results:
        """Like `chat`, but yield the number of a conversation and its output, or its `error`, as soon as it is finished."""
        return self._results(CHAT, messages, sampling_params, fields)

    def update_weights(self, source: Any) -> None:
        self._thread.call(self._engine.update_weights, source)

    def _all(self, path: str, prompts: Any, params: Params, errors: str = "raise", **fields: Any) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        with contextlib.closing(self._results(path, prompts, params, fields)) as results:
            for number, output in results:
                if output.error is not None and errors == "raise":
                    raise output.error
                outputs[number] = output
        return [outputs[number] for number in range(len(outputs))]

    def _results(self, path: str, prompts: Any, params: Params, fields: Fields) -> Results:
        """Iterate over results. Closing the iterator aborts the unfinished requests."""
        asked = listed(prompts)
        answers = {self._thread.start_task_soon(self._engine.answer, path, asked[i], params, fields): i for i in range(len(asked))}
        try:
            for answer in as_completed(answers):
                try:
                    output = answer.result()
                except (ValueError, OSError) as error:
                    output = RequestOutput(asked[answers[answer]], [], error=error)
                yield answers[answer], output
        finally:
            for answer in answers:
                answer.cancel()


def write_tensors(tensors: Mapping[str, Any], path: str) -> None:
    """Write copies of torch tensors, of which some may be tied, to a safetensors file."""
    from safetensors.torch import save_file  # imports torch

    save_file({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, path)
