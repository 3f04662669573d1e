"""`POST /v1/embeddings`, `/rerank` and `/score`: numbers instead of text, for checkpoints that were trained for it. Routed to by
`server/http/app.py`.

    texts, messages ──▶ the conversation that such a checkpoint was trained on ──▶ hidden state, or logits of "yes" and "no" ──▶ JSON

The conversations are those of Qwen3-VL-Embedding and Qwen3-VL-Reranker.
"""

import math
import secrets
import time
import unicodedata
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64
from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from starlette.responses import JSONResponse, Response

from engine.messages import ChatPrompt, Event, Submit, TokenPrompt
from engine.params import OutputOptions, SamplingParams
from server.api.chat import source_of
from server.api.conversation import read_conversation
from server.api.generation import GatheringEndpoint, Job, stages_of
from server.api.schema import MAX_MESSAGES, ChatRequest, Message, Parts, ProcessorKwargs, TokenId, check_images
from server.http.body import Body
from server.http.validate import Strict, bad_value, check

MAX_INPUTS = 1000  # as many as LangChain sends at once
EMBED = "Represent the user's input."
RERANK = "Given a search query, retrieve relevant candidates that answer the query."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
ANSWERS = ["yes", "no"]

Floats = npt.NDArray[np.float32]


def _shape(value: object) -> str:
    return "<list>" if isinstance(value, list) else "<object>" if isinstance(value, dict) else "<text>"


def _is_ids(value: object) -> str:
    return "<ids>" if isinstance(value, list) and value and type(value[0]) is int else "<list>" if isinstance(value, list) else "<text>"


Text = Annotated[str, Tag("<text>")]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), Tag("<ids>")]
Inputs = Annotated[
    list[Annotated[Text | Ids, Discriminator(_is_ids)]], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("<list>")
]


class PoolingRequest(Strict):
    """What the endpoints have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    instruction: str | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    user: str | None = None


class EmbeddingRequest(PoolingRequest):
    """The body of `POST /v1/embeddings`: `input`, or `messages` with images, which are one."""

    input: Annotated[Text | Ids | Inputs, Discriminator(_is_ids)] = ""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "EmbeddingRequest":
        if ("input" in self.model_fields_set) == (self.messages is not None):
            raise ValueError("needs either `input` or `messages`")
        return self


class Content(Strict):
    """A query or a document with images."""

    content: Annotated[Annotated[Parts, Tag("<list>")] | Text, Discriminator(_shape)]


Item = Annotated[Text | Annotated[Content, Tag("<object>")], Discriminator(_shape)]
ItemList = Annotated[list[Item], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("<list>")]
Items = Annotated[ItemList | Text | Annotated[Content, Tag("<object>")], Discriminator(_shape)]


class RerankRequest(PoolingRequest):
    """The body of `POST /rerank`."""

    query: Item
    documents: ItemList
    top_n: Annotated[int, Field(ge=0)] | None = None  # 0: all
    return_documents: bool | None = None


class ScoreRequest(PoolingRequest):
    """The body of `POST /score`: each of the second to the one first, or both in pairs."""

    text_1: Items
    text_2: Items


class PoolingEndpoint(GatheringEndpoint):
    """Answers with what `show` makes of the numbers."""

    def answer(self, job: Job, events: list[Event]) -> Response:
        num_tokens = sum(event.num_prompt_tokens for event in events)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        values = [np.frombuffer(event.pooled, np.float32) for event in events]
        return self.show(job, values, {"model": job.request.model or self.service.model_names[0], "usage": usage})

    @abstractmethod
    def show(self, job: Job, values: list[Floats], head: dict[str, object]) -> Response:
        """`values` are in the order of the job's submits."""

    def checked(self, model: type[Any], value: dict[str, Any]) -> Any:
        """RequestError 400; unknown fields are named in the log."""
        request = check(model, value)
        self.note_unknown(request.model_extra or {})
        return request

    def job_of(self, request: PoolingRequest, field: str, prompts: Sequence[Any], words: list[str], body: Body) -> Job:
        """One Submit a prompt: messages, or token ids. Errors name the `field`. RequestError 400."""
        chat = ChatRequest(model=request.model, messages=[Message(role="user", content="")], cache_salt=request.cache_salt)
        job = Job(chat, [])
        for prompt in prompts:
            rid = body.rid if not job.submits else self.service.client.new_rid()
            said: ChatPrompt | TokenPrompt
            if isinstance(prompt[0], int):
                said, media = TokenPrompt(prompt), []
            else:
                check_images(prompt)
                conversation = read_conversation(prompt, source_of(chat, body), request.mm_processor_kwargs)
                said, media = ChatPrompt(msgspec.json.encode(conversation.messages)), conversation.media
                job.used |= conversation.used_references
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            options = OutputOptions(), stages_of(body)
            salt = request.cache_salt or ""
            job.submits.append(Submit(rid, said, media, params, *options, cache_salt=salt, prompt_field=field, pooled_words=words))
        return job


class EmbeddingsEndpoint(PoolingEndpoint):
    """The hidden state of the last token, of length one."""

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request: EmbeddingRequest = self.checked(EmbeddingRequest, value)
        hidden_size = self.service.checkpoint.hidden_size
        if request.dimensions is not None and request.dimensions > hidden_size:
            raise bad_value("dimensions", f"must be at most {hidden_size}")
        prompts: list[Any]
        if request.messages is not None:
            has_system = request.messages[0].role in ("system", "developer")
            prompts = [request.messages if has_system else [_system(request.instruction, EMBED), *request.messages]]
        else:
            given = request.input
            inputs: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
            prompts = [self._prompt_of(entry, request) for entry in inputs]
        job = self.job_of(request, "input" if request.messages is None else "messages", prompts, [], body)
        job.echo = {"format": request.encoding_format or "float", "dimensions": request.dimensions or hidden_size}
        return job

    def show(self, job: Job, values: list[Floats], head: dict[str, object]) -> Response:
        entries = []
        for index, hidden in enumerate(values):
            vector = hidden[: int(str(job.echo["dimensions"]))].astype(np.float64)
            unit = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
            shown: object = pybase64.b64encode_as_string(unit.tobytes()) if job.echo["format"] == "base64" else unit.tolist()
            entries.append({"object": "embedding", "index": index, "embedding": shown})
        return JSONResponse({"object": "list", "data": entries, **head})

    def _prompt_of(self, entry: str | list[int], request: EmbeddingRequest) -> list[Any]:
        """Token ids are a whole prompt."""
        if isinstance(entry, list):
            vocab_size = self.service.checkpoint.vocab_size
            if max(entry) >= vocab_size:
                raise bad_value("input", f"holds token ids outside of the vocabulary of {vocab_size}")
            return entry
        return [_system(request.instruction, EMBED), Message(role="user", content=entry or "NULL")]


class RerankEndpoint(PoolingEndpoint):
    """How well each document answers the query, the best first."""

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request: RerankRequest = self.checked(RerankRequest, value)
        prompts = [judged(request.instruction, request.query, document) for document in request.documents]
        job = self.job_of(request, "documents", prompts, ANSWERS, body)
        documents = [document if isinstance(document, str) else None for document in request.documents]
        job.echo = {"top_n": request.top_n or len(documents), "documents": documents if request.return_documents is not False else []}
        return job

    def show(self, job: Job, values: list[Floats], head: dict[str, object]) -> Response:
        documents: Any = job.echo["documents"]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": probability_of_yes(logits)} for i, logits in enumerate(values)]
        for result, document in zip(results, documents, strict=False):
            if document is not None:
                result["document"] = {"text": document}
        results.sort(key=lambda result: -result["relevance_score"])
        return JSONResponse({"id": f"rerank-{secrets.token_hex(16)}", "results": results[: int(str(job.echo["top_n"]))], **head})


class ScoreEndpoint(PoolingEndpoint):
    """The same for pairs, in their order."""

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request: ScoreRequest = self.checked(ScoreRequest, value)
        first, second = (items if isinstance(items, list) else [items] for items in (request.text_1, request.text_2))
        if len(first) not in (1, len(second)):
            raise bad_value("text_1", "must be one, or as many as text_2")
        queries = first * len(second) if len(first) == 1 else first
        prompts = [judged(request.instruction, query, document) for query, document in zip(queries, second, strict=True)]
        return self.job_of(request, "text_2", prompts, ANSWERS, body)

    def show(self, job: Job, values: list[Floats], head: dict[str, object]) -> Response:
        scores = [{"index": i, "object": "score", "score": probability_of_yes(logits)} for i, logits in enumerate(values)]
        identity = {"id": f"score-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
        return JSONResponse({**identity, "data": scores, **head})


def probability_of_yes(logits: Floats) -> float:
    """Against "no"."""
    yes, no = (float(value) for value in logits)
    return 1 / (1 + math.exp(min(no - yes, 700.0)))


def judged(instruction: str | None, query: str | Content, document: str | Content) -> list[Message]:
    """The question that a reranker answers with yes or no."""
    parts = [_text(f"<Instruct>: {instruction or RERANK}"), *_parts(query, "<Query>:"), *_parts(document, "\n<Document>:")]
    return [Message(role="system", content=JUDGE), Message.model_validate({"role": "user", "content": parts})]


def _parts(item: str | Content, opening: str) -> list[dict[str, Any]]:
    said = item if isinstance(item, str) else item.content
    if isinstance(said, str):
        return [_text(opening), _text(said or "NULL")]
    parts = [part.model_dump(exclude_unset=True, by_alias=True) for part in said]
    return [_text(opening), *(parts or [_text("NULL")])]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _system(instruction: str | None, default: str) -> Message:
    """An instruction ends with a punctuation mark."""
    text = (instruction or "").strip() or default
    return Message(role="system", content=text if unicodedata.category(text[-1]).startswith("P") else f"{text}.")
