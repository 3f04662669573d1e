"""`POST /v1/embeddings`, `/rerank` and `/score`, with the conversations of Qwen3-VL-Embedding and Qwen3-VL-Reranker.

texts, messages ──▶ conversation ──▶ hidden state, or logits of "yes" and "no" ──▶ JSON
"""

import math
import secrets
import time
import unicodedata
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64
from starlette.responses import Response

from engine.wire.messages import ChatPrompt, Event, TokenPrompt
from engine.wire.params import OutputOptions, SamplingParams
from server.dialects.pooling import schema
from server.dialects.pooling.schema import EmbeddingRequest, ItemContent, PoolingRequest, RerankRequest, ScoreRequest
from server.http.body import Body
from server.http.sse import encode
from server.http.validate import bad_value, check
from server.openai.conversation import read_conversation
from server.openai.endpoint import Endpoint, GatheringEndpoint, Job, json_response, submits_of
from server.openai.parts import Message
from server.openai.schema import ChatRequest

EMBED = "Represent the user's input."
RERANK = "Given a search query, retrieve relevant candidates that answer the query."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
ANSWERS = ["yes", "no"]

Floats = npt.NDArray[np.float32]


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
        """RequestError 400."""
        request = check(model, value)
        self.note_unknown(request.model_extra or {})
        return request

    def job_of(self, request: PoolingRequest, field: str, prompts: Sequence[Any], words: list[str], body: Body) -> Job:
        """A prompt is messages, or token ids. RequestError 400."""
        salt = request.cache_salt or ""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        submits = submits_of(body, [TokenPrompt(prompt) for prompt in prompts], field, params, OutputOptions(), cache_salt=salt)
        job = Job(ChatRequest(model=request.model, messages=[Message(role="user", content="")]), submits)
        for submit, prompt in zip(submits, prompts, strict=True):
            submit.pooled_words = words
            if not isinstance(prompt[0], int):
                conversation = read_conversation(prompt, body, salt, request.mm_processor_kwargs, request.media_io_kwargs)
                submit.prompt, submit.media = ChatPrompt(msgspec.json.encode(conversation.messages)), conversation.media
                job.used |= conversation.used_references
        return job


class EmbeddingsEndpoint(PoolingEndpoint):
    """A vector of a text, or of messages with images."""

    takes, gives = EmbeddingRequest, schema.Embeddings

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
        """Each vector is written alone, so that other threads run in between."""
        entries = b",".join(self._entry(job, index, hidden) for index, hidden in enumerate(values))
        return json_response(b'{"object":"list","data":[' + entries + b"]," + encode(head)[1:])

    @staticmethod
    def _entry(job: Job, index: int, hidden: Floats) -> bytes:
        vector = hidden[: int(str(job.echo["dimensions"]))].astype(np.float64)
        unit = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
        shown: object = pybase64.b64encode_as_string(unit.tobytes()) if job.echo["format"] == "base64" else unit.tolist()
        return encode({"object": "embedding", "index": index, "embedding": shown})

    def _prompt_of(self, entry: str | list[int], request: EmbeddingRequest) -> list[Any]:
        """Token ids are a whole prompt."""
        if isinstance(entry, list):
            vocab_size = self.service.checkpoint.vocab_size
            if max(entry) >= vocab_size:
                raise bad_value("input", f"holds token ids outside of the vocabulary of {vocab_size}")
            return entry
        return [_system(request.instruction, EMBED), Message(role="user", content=entry or "NULL")]


class RerankEndpoint(PoolingEndpoint):
    """Documents by how well they answer a query, the best first."""

    takes, gives = RerankRequest, schema.Ranking

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
        return json_response(encode({"id": f"rerank-{secrets.token_hex(16)}", "results": results[: int(str(job.echo["top_n"]))], **head}))


class ScoreEndpoint(PoolingEndpoint):
    """How well one text answers another."""

    takes, gives = ScoreRequest, schema.Scores

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
        return json_response(encode({**identity, "data": scores, **head}))


ROUTES: dict[str, type[Endpoint]] = {
    "/v1/embeddings": EmbeddingsEndpoint,
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankEndpoint),
    **dict.fromkeys(("/score", "/v1/score"), ScoreEndpoint),
}


def probability_of_yes(logits: Floats) -> float:
    """Against "no"."""
    yes, no = (float(value) for value in logits)
    return 1 / (1 + math.exp(min(no - yes, 700.0)))


def judged(instruction: str | None, query: str | ItemContent, document: str | ItemContent) -> list[Message]:
    """The question that a reranker answers with yes or no."""
    parts = [_text(f"<Instruct>: {instruction or RERANK}"), *_parts(query, "<Query>:"), *_parts(document, "\n<Document>:")]
    return [Message(role="system", content=JUDGE), Message.model_validate({"role": "user", "content": parts})]


def _parts(item: str | ItemContent, opening: str) -> list[dict[str, Any]]:
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
