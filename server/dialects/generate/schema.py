"""What requests and answers of SGLang's own dialect hold."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from engine.wire.params import NumLogprobs
from server.http.validate import OneOf, Open, Worded
from server.openai.parts import FIRST
from server.openai.schema import Ids

IMAGES = "must be an image, a list of images, or for several prompts a list of either: URLs, or base64"
Images = Annotated[list[str], FIRST]


class Sampling(Open):
    """As chat completions have them, but for these names."""

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    sampling_seed: int | None = None


class GenerateRequest(Open):
    """The body of `POST /generate`: `text` or `input_ids`, of one prompt or of several."""

    text: Annotated[str | Annotated[list[str], FIRST] | None, OneOf()] = None
    input_ids: Annotated[Ids | Annotated[list[Ids], FIRST] | None, OneOf(), Worded("must be a list of token ids, or of such lists")] = None
    image_data: Annotated[str | Images | Annotated[list[str | Images | None], FIRST] | None, Worded(IMAGES)] = None
    sampling_params: Annotated[Sampling | None, Worded("must be an object")] = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None  # -1: none of the prompt
    top_logprobs_num: NumLogprobs | None = None
    stream: bool | None = None


class MetaInfo(BaseModel):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float | None = None
    input_token_logprobs: list[Any] | None = None
    output_token_logprobs: list[Any] | None = None
    input_top_logprobs: list[Any] | None = None
    output_top_logprobs: list[Any] | None = None


class Generated(BaseModel):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None


class ModelInfo(BaseModel):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None = None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: bool
