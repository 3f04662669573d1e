"""`LLM`: an engine in a thread of its own, for scripts that ask many things at once."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

import uvloop
from tqdm import tqdm

from engine.llm.inputs import CHAT, COMPLETIONS, EMBEDDINGS, Ask, conversations_of, prompts_of
from engine.llm.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from engine.llm.params import SamplingParams
from engine.llm.session import Session

Params = SamplingParams | Sequence[SamplingParams] | None
Errors = Literal["raise", "return"]
Result = TypeVar("Result")


class LLM:
    """`with LLM(model=..., flags of engine.serve) as llm: llm.chat(messages)`. Without `with`, the processes end with `close`, with the
    object or with the program.

    Lists are answered in their order. The first request that fails raises, as in AsyncLLM, and ends the others; with `errors="return"` it
    is the `error` of its output. `fields` are more of the API's fields.
    """

    def __init__(self, model: str = "demo", **flags: Any):
        """Returns when the engine is ready. Raises ValueError, OSError or ChildDied."""
        self._session = Session({"model": model, **flags})
        self._loop = Loop()
        self.close: Callable[[], object] = weakref.finalize(self, _end, self._loop, self._session)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._loop.run(self._session.start())
            undo.pop_all()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chat(
        self, messages: str | Sequence[Any], sampling_params: Params = None, use_tqdm: bool = True, errors: Errors = "raise", **fields: Any
    ) -> list[RequestOutput]:
        """Answer a text, a conversation, or each of a list. Parts of messages may be pictures: PIL images, bytes, paths, URLs."""
        return self._answer(CHAT, conversations_of(messages), sampling_params, use_tqdm, errors, fields)

    def generate(
        self, prompts: Any, sampling_params: Params = None, use_tqdm: bool = True, errors: Errors = "raise", **fields: Any
    ) -> list[RequestOutput]:
        """How a text, or token ids, go on; or each of a list."""
        return self._answer(COMPLETIONS, prompts_of(prompts), sampling_params, use_tqdm, errors, fields)

    def embed(self, prompts: Any, use_tqdm: bool = True, errors: Errors = "raise", **fields: Any) -> list[EmbeddingRequestOutput]:
        """Of a text, token ids or a conversation; or each of a list."""
        asks = [Ask(EMBEDDINGS, prompt, SamplingParams(), {**fields, "encoding_format": "base64"}) for prompt in prompts_of(prompts)]

        async def embed(ask: Ask) -> EmbeddingRequestOutput:
            try:
                return await self._session.embed(ask)
            except (ValueError, OSError) as error:
                if errors == "raise":
                    raise
                return EmbeddingRequestOutput("", EmbeddingOutput([]), error=error)

        return self._run(embed, asks, use_tqdm)

    def _answer(
        self, path: str, prompts: list[Any], params: Params, use_tqdm: bool, errors: Errors, fields: dict[str, Any]
    ) -> list[RequestOutput]:
        of_each = [params or SamplingParams()] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(of_each) != len(prompts):
            raise ValueError(f"there are {len(of_each)} sampling_params for {len(prompts)} prompts")

        async def answer(ask: Ask) -> RequestOutput:
            try:
                return await self._session.answer(ask)
            except (ValueError, OSError) as error:
                if errors == "raise":
                    raise
                return RequestOutput("", ask.prompt, error=error)

        return self._run(answer, [Ask(path, prompt, one, fields) for prompt, one in zip(prompts, of_each, strict=True)], use_tqdm)

    def _run(self, answer: Callable[[Ask], Coroutine[Any, Any, Result]], asks: list[Ask], use_tqdm: bool) -> list[Result]:
        with tqdm(total=len(asks), disable=not use_tqdm, desc="Answers", unit="request") as bar:
            return self._loop.run(self._session.map(answer, asks, lambda _: bar.update()))


class Loop:
    """An event loop in a thread, which is the parent of the engine's processes."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def run(self, task: Coroutine[Any, Any, Result]) -> Result:
        """Its result. Whoever interrupts the wait (Ctrl-C) ends the task."""
        future = asyncio.run_coroutine_threadsafe(task, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _end(loop: Loop, session: Session) -> None:
    """Without the LLM, which is gone perhaps."""
    loop.run(session.close())
    loop.end()
