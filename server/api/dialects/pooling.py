"""Embeddings and scores, with the conversations of Qwen3-VL-Embedding and Qwen3-VL-Reranker."""

import functools
import itertools
import math
import secrets
import time
import unicodedata
from abc import abstractmethod
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64
from pydantic import AliasChoices, Field
from starlette.responses import Response

from engine.wire.messages import ChatPrompt, Event
from engine.wire.params import OutputOptions, SamplingParams, TokenCount
from engine.wire.reports import Numbers
from server.api.chat.completions import read_conversation
from server.api.chat.endpoint import Endpoint, json_response, submits_of
from server.api.http.body import Body
from server.api.http.registry import check_prompts_bytes
from server.api.http.reply import GatheredReply, Reply
from server.api.http.streaming import encode
from server.api.schema.parts import Content, Message, TextPart
from server.api.schema.requests import AnyIds, MediaRequest, MessageList, check_ids, prompts_of
from server.api.schema.validate import Strict, bad_value

EMBED = "Represent the user's input."
RERANK = "Given a search query, retrieve relevant candidates that answer the query."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
LABELS = ["yes", "no"]
InputList = Field(min_length=1, max_length=1000, fail_fast=True)  # LangChain's batch size
IdList = Annotated[AnyIds, Field(min_length=1)]
Json = dict[str, Any]
Floats = npt.NDArray[np.float32]


class PoolingRequest(MediaRequest):
    instruction: str | None = None


class EmbeddingRequest(PoolingRequest):
    input: str | IdList | Annotated[list[str | IdList], InputList] | None = None
    messages: Annotated[list[Message], MessageList] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: TokenCount | None = None


class ItemContent(Strict):
    content: Content


Item = str | ItemContent
Items = Annotated[list[Item], InputList]
Texts = Items | str | ItemContent


class RerankRequest(PoolingRequest):
    query: Item
    documents: Items
    top_n: Annotated[int, Field(ge=0)] | None = None  # 0: all
    return_documents: bool | None = None


class ScoreRequest(PoolingRequest):
    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1", "query"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))


class PoolingEndpoint(Endpoint):
    """Base of endpoints that return logits of `words`, or hidden states."""

    words = LABELS

    @abstractmethod
    def prompts(self, request: Any) -> tuple[str, list[Any]]:
        """Return a field and its prompts: messages or token ids. RequestError 400."""

    @abstractmethod
    def show(self, request: Any, values: list[Floats]) -> Json: ...

    def read(self, value: Json, body: Body) -> Reply:
        request = self.check(self.takes, value)
        field, prompts = self.prompts(request)
        submits = submits_of(
            body, prompts, field, pooled_words=self.words, cache_salt=request.cache_salt or "",
            params=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), output=OutputOptions(),
        )  # fmt: skip
        num_bytes = 0
        for submit, prompt in zip(submits, prompts, strict=True):
            if not isinstance(prompt[0], int):
                messages, submit.media = read_conversation(request, prompt, body)
                submit.prompt = ChatPrompt(msgspec.json.encode(messages))
                num_bytes += len(submit.prompt.messages)
                check_prompts_bytes(num_bytes if len(prompts) > 1 else 0)
        return GatheredReply(request, submits, functools.partial(self._answer, request))

    def _answer(self, request: PoolingRequest, events: list[Event]) -> Response:
        usage = dict.fromkeys(("prompt_tokens", "total_tokens"), sum(event.num_prompt_tokens for event in events))
        head = {"id": f"pool-{secrets.token_hex(16)}", "object": "list", "created": int(time.time()), "usage": usage}
        head["model"] = request.model or self.service.model_names[0]
        values = [np.frombuffer(event.report.values, np.float32) for event in events if isinstance(event.report, Numbers)]
        return json_response(encode(head | self.show(request, values)))


class EmbeddingsEndpoint(PoolingEndpoint):
    """An embedding of a text, or of messages with images."""

    takes, words = EmbeddingRequest, []

    def prompts(self, request: EmbeddingRequest) -> tuple[str, list[Any]]:
        if (request.input is None) == (request.messages is None):
            raise bad_value("input", "either `input` or `messages` is required, and not both")
        text, inputs = self.service.checkpoint.model.text, prompts_of(request.input)
        if (request.dimensions or 0) > text.hidden_size:
            raise bad_value("dimensions", f"must be at most {text.hidden_size}")
        check_ids(inputs, "input", text.vocab_size)
        system = [_system(request)]
        if request.messages is not None:
            return "messages", [[*(() if request.messages[0].role in ("system", "developer") else system), *request.messages]]
        return "input", [entry if isinstance(entry, list) else [*system, Message(role="user", content=entry or "NULL")] for entry in inputs]

    def show(self, request: EmbeddingRequest, values: list[Floats]) -> Json:
        """Serialise each vector separately, so that other threads run in between."""
        return {"data": [msgspec.Raw(encode(self._entry(request, i, hidden))) for i, hidden in enumerate(values)]}

    def _entry(self, request: EmbeddingRequest, index: int, hidden: Floats) -> Json:
        vector = hidden[: request.dimensions].astype(np.float64)
        vector = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
        shown = pybase64.b64encode_as_string(vector.tobytes()) if request.encoding_format == "base64" else vector.tolist()
        return {"object": "embedding", "index": index, "embedding": shown}


class RerankEndpoint(PoolingEndpoint):
    """Documents ordered by relevance to a query."""

    takes = RerankRequest

    def prompts(self, request: RerankRequest) -> tuple[str, list[Any]]:
        return "documents", [judged(request, request.query, document) for document in request.documents]

    def show(self, request: RerankRequest, values: list[Floats]) -> Json:
        results: list[Json] = []
        for i, (logits, document) in enumerate(zip(values, request.documents, strict=True)):
            shown = {"document": {"text": document}} if isinstance(document, str) and request.return_documents is not False else {}
            results.append({"index": i, "relevance_score": probability_of_yes(logits), **shown})
        return {"results": sorted(results, key=lambda result: -result["relevance_score"])[: request.top_n or None]}


class ScoreEndpoint(PoolingEndpoint):
    """Relevance scores of pairs of texts."""

    takes = ScoreRequest

    def prompts(self, request: ScoreRequest) -> tuple[str, list[Any]]:
        first, second = (items if isinstance(items, list) else [items] for items in (request.text_1, request.text_2))
        if len(first) not in (1, len(second)):
            raise bad_value("text_1", "must be one, or as many as text_2")
        return "text_2", [judged(request, query, document) for query, document in zip(itertools.cycle(first), second, strict=False)]

    def show(self, request: ScoreRequest, values: list[Floats]) -> Json:
        return {"data": [{"index": i, "object": "score", "score": probability_of_yes(logits)} for i, logits in enumerate(values)]}


ROUTES: dict[str, type[Endpoint]] = {
    "/v1/embeddings": EmbeddingsEndpoint,
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankEndpoint),
    **dict.fromkeys(("/score", "/v1/score"), ScoreEndpoint),
}


def probability_of_yes(logits: Floats) -> float:
    yes, no = map(float, logits)
    return 1 / (1 + math.exp(min(no - yes, 700.0)))


def judged(request: PoolingRequest, query: str | ItemContent, document: str | ItemContent) -> list[Message]:
    parts = [f"<Instruct>: {request.instruction or RERANK}", "<Query>:", *_parts(query), "\n<Document>:", *_parts(document)]
    content = [TextPart(type="text", text=part) if isinstance(part, str) else part for part in parts]
    return [Message(role="system", content=JUDGE), Message(role="user", content=content)]


def _parts(item: str | ItemContent) -> list[Any]:
    content = (item if isinstance(item, str) else item.content) or "NULL"
    return [content] if isinstance(content, str) else content


def _system(request: PoolingRequest) -> Message:
    """Return the system message with the instruction, which gets a final punctuation mark."""
    text = (request.instruction or "").strip() or EMBED
    return Message(role="system", content=text if unicodedata.category(text[-1]).startswith("P") else f"{text}.")
