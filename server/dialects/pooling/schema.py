"""What requests and answers of embeddings, rerank and score hold."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from engine.wire.params import TokenId
from server.http.validate import OneOf, Open, Strict
from server.openai.answers import Usage
from server.openai.media import MediaIoKwargs, ProcessorKwargs
from server.openai.parts import Message, Parts
from server.openai.schema import MessageList, Salt

MAX_INPUTS = 1000  # as many as LangChain sends at once
InputList = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class PoolingRequest(Open):
    """What the endpoints have in common."""

    model: str | None = None
    instruction: str | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    media_io_kwargs: MediaIoKwargs | None = None
    cache_salt: Salt | None = None
    user: str | None = None
    truncate_prompt_tokens: None = None  # prompts are whole


class EmbeddingRequest(PoolingRequest):
    """The body of `POST /v1/embeddings`: `input`, or `messages` with images, which are one."""

    input: Annotated[str | Ids | Annotated[list[Annotated[str | Ids, OneOf()]], InputList], OneOf()] = ""
    messages: Annotated[list[Message], MessageList] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "EmbeddingRequest":
        if ("input" in self.model_fields_set) == (self.messages is not None):
            raise ValueError("needs either `input` or `messages`")
        return self


class ItemContent(Strict):
    """A query or a document with images."""

    content: Annotated[Parts | str, OneOf()]


Item = Annotated[str | ItemContent, OneOf()]
ItemList = Annotated[list[Item], InputList]


class RerankRequest(PoolingRequest):
    """The body of `POST /rerank`."""

    query: Item
    documents: ItemList
    top_n: Annotated[int, Field(ge=0)] | None = None  # 0: all
    return_documents: bool | None = None


class ScoreRequest(PoolingRequest):
    """The body of `POST /score`: each of the second to the one first, or both in pairs."""

    text_1: Annotated[ItemList | str | ItemContent, OneOf()]
    text_2: Annotated[ItemList | str | ItemContent, OneOf()]


class Pooled(BaseModel):
    model: str
    usage: Usage


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Pooled):
    object: Literal["list"]
    data: list[Embedding]


class Ranked(BaseModel):
    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Ranking(Pooled):
    id: str
    results: list[Ranked]


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class Scores(Pooled):
    id: str
    object: Literal["list"]
    created: int
    data: list[Score]
