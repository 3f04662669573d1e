"""`LLM`: an `AsyncLLM` in a thread, for scripts with many prompts."""

import contextlib
import functools
import queue
import weakref
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Concatenate, Literal, ParamSpec

from anyio.from_thread import start_blocking_portal
from tqdm import tqdm

from engine.llm.client import AsyncLLM
from engine.llm.inputs import CHAT, COMPLETIONS, EMBEDDINGS, Ask, SamplingParams, listed
from engine.llm.outputs import EmbeddingRequestOutput, RequestOutput

Params = SamplingParams | Sequence[SamplingParams] | None
Errors = Literal["raise", "return"]
Results = Generator[tuple[int, Any], None, None]
P = ParamSpec("P")


def _waiting(method: Callable[Concatenate[AsyncLLM, P], Awaitable[None]]) -> Callable[Concatenate["LLM", P], None]:
    """Return a method of `LLM` that waits for one of `AsyncLLM`."""

    @functools.wraps(method)
    def call(self: "LLM", *args: P.args, **kwargs: P.kwargs) -> None:
        self._thread.call(functools.partial(method, self._engine, *args, **kwargs))

    return call


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
        """Answer a text, a conversation, or each of a list. Parts of messages may be pictures: PIL images, bytes, paths, URLs."""
        return self._all(_asks(CHAT, messages, sampling_params, fields), use_tqdm, errors)

    def generate(
        self, prompts: Any, sampling_params: Params = None, use_tqdm: bool = True, errors: Errors = "raise", **fields: Any
    ) -> list[RequestOutput]:
        """Continue a text, or token ids; or each of a list."""
        return self._all(_asks(COMPLETIONS, prompts, sampling_params, fields), use_tqdm, errors)

    def embed(self, prompts: Any, use_tqdm: bool = True, errors: Errors = "raise", **fields: Any) -> list[EmbeddingRequestOutput]:
        """Embed a text, token ids or a conversation; or each of a list."""
        return self._all(_asks(EMBEDDINGS, prompts, None, fields), use_tqdm, errors)

    def as_completed(self, messages: Any, sampling_params: Params = None, **fields: Any) -> Results:
        """Like `chat`, but yield the number of a conversation and its output, or its `error`, as soon as it is finished."""
        return self._results(_asks(CHAT, messages, sampling_params, fields))

    pause = _waiting(AsyncLLM.pause)
    resume = _waiting(AsyncLLM.resume)
    update_weights = _waiting(AsyncLLM.update_weights)

    def _all(self, asks: list[Ask], use_tqdm: bool, errors: Errors) -> list[Any]:
        outputs: dict[int, Any] = {}
        with contextlib.closing(self._results(asks)) as results:
            for number, output in tqdm(results, total=len(asks), disable=not use_tqdm, desc="Answers", unit="request"):
                if output.error is not None and errors == "raise":
                    raise output.error
                outputs[number] = output
        return [outputs[number] for number in range(len(asks))]

    def _results(self, asks: list[Ask]) -> Results:
        """Iterate over results. Closing the iterator aborts the unfinished requests."""
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        answering = self._thread.start_task_soon(self._engine.answer_all, asks, results.put)
        answering.add_done_callback(lambda _: results.put(None))
        try:
            while (output := results.get()) is not None:
                yield output.number, output
            answering.result()
        finally:
            answering.cancel()


def _asks(path: str, prompts: Any, params: Params, fields: dict[str, Any]) -> list[Ask]:
    prompts = listed(prompts)
    of_each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    if len(of_each) != len(prompts):
        raise ValueError(f"got {len(of_each)} sampling_params for {len(prompts)} prompts")
    return [Ask(path, prompt, one, fields, number) for number, (prompt, one) in enumerate(zip(prompts, of_each, strict=True))]
