"""`AsyncLLM`: an engine in the caller's event loop, with streams."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from engine.llm.inputs import CHAT, COMPLETIONS, EMBEDDINGS, Ask, Message, Prompt
from engine.llm.outputs import EmbeddingRequestOutput, RequestOutput
from engine.llm.params import SamplingParams
from engine.llm.session import Session


class AsyncLLM:
    """`async with AsyncLLM(model=..., flags of engine.serve) as llm: async for output in llm.chat(messages)`.

    Requests raise RequestError (a ValueError) for what HTTP would refuse, OSError for a file that is not there, ChildDied when the
    engine is gone. An iterator that is closed ends the engine's work. `fields` are more of the API's fields.
    """

    def __init__(self, model: str = "demo", **flags: Any):
        """Raises ValueError for a bad flag."""
        self._session = Session({"model": model, **flags})

    async def __aenter__(self) -> "AsyncLLM":
        await self._session.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def chat(
        self, messages: str | Sequence[Message], sampling_params: SamplingParams | None = None, **fields: Any
    ) -> AsyncIterator[RequestOutput]:
        """The answer so far, whenever it has grown; the last one is finished."""
        return self._session.stream(Ask(CHAT, messages, sampling_params or SamplingParams(), fields))

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **fields: Any) -> AsyncIterator[RequestOutput]:
        """The same of a text, or of token ids, which go on."""
        return self._session.stream(Ask(COMPLETIONS, prompt, sampling_params or SamplingParams(), fields))

    async def embed(self, prompt: Prompt | Sequence[Message], **fields: Any) -> EmbeddingRequestOutput:
        """Of a text, token ids, or messages with pictures."""
        return await self._session.embed(Ask(EMBEDDINGS, prompt, SamplingParams(), {**fields, "encoding_format": "base64"}))
