"""SGLang's own dialect, which frameworks for evaluation and reinforcement learning speak: `POST /generate` is translated into a text
completion, with pictures where its prompt has their placeholders.
"""

import asyncio
import contextlib
import re
import time
from typing import Any

from engine.wire.messages import MediaRef, Submit, TextPrompt, TokenPrompt
from engine.wire.params import OutputOptions, SamplingParams
from engine.wire.stats import Stages
from server.dialects.generate import schema
from server.dialects.generate.format import GenerateFormat
from server.dialects.generate.schema import GenerateRequest, Sampling
from server.errors import RequestError
from server.http.body import Body
from server.http.validate import bad_value, check
from server.openai.conversation import locate
from server.openai.endpoint import Endpoint, GenerationEndpoint, Job, Service
from server.openai.fields import limits_of, rest_of
from server.openai.openapi import DescribedRoute
from server.openai.schema import CompletionRequest

BARE = re.compile(r"[A-Za-z0-9+/_-]{64,}={0,2}")  # base64 without its `data:`
HEALTH_S = 20.0
LIMITED = limits_of(
    ((), "audio_data video_data input_embeds prompt_logprobs echo"),
    ((False,), "return_text_in_logprobs return_token_ids return_tokens_as_token_ids logprobs"),
    (([],), "token_ids_logprob"),
)
HARMLESS = ("modalities", "log_metrics", "image_max_dynamic_patch", "background")


class GenerateEndpoint(GenerationEndpoint):
    """How texts, or token ids, with pictures in them, go on: SGLang's native endpoint."""

    takes, gives, streams = GenerateRequest, schema.Generated | list[schema.Generated], schema.Generated
    last_data = "[DONE]"
    format = GenerateFormat

    def read(self, value: dict[str, Any], body: Body) -> Job:
        asked = check(GenerateRequest, value)
        field, prompts = _prompts(asked)
        try:
            request = self.check(CompletionRequest, completion_body(asked, prompts))
        except RequestError as error:
            raise error if error.info.param != "prompt" else bad_value(field, error.info.message.partition(": ")[2]) from None
        found = [TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt) for prompt in prompts]
        job = self.job_of(request, body, found, field)
        for submit, images in zip(job.submits, _images(asked, len(prompts)), strict=True):
            for i, image in enumerate(images):
                url = f"data:image/any;base64,{image}" if BARE.fullmatch(image) else image
                submit.media.append(MediaRef(*locate(url, f"image_data.{i}", body, job.used)))
        start = -1 if asked.logprob_start_len is None else asked.logprob_start_len
        is_batch = isinstance(getattr(asked, field)[0], str | list) and not isinstance(getattr(asked, field), str)
        job.echo = {"is_list": is_batch or (request.n or 1) > 1, "start": start, "num_top": asked.top_logprobs_num or 0}
        return job


ROUTES: dict[str, type[Endpoint]] = {"/generate": GenerateEndpoint}


def completion_body(asked: GenerateRequest, prompts: list[Any]) -> dict[str, Any]:
    """As text completions have it. RequestError 400."""
    sampling = asked.sampling_params or Sampling()
    extra = rest_of(asked.model_extra, LIMITED, HARMLESS) | rest_of(sampling.model_extra, LIMITED, HARMLESS)
    num_top = (asked.top_logprobs_num or 0) if asked.return_logprob else None
    wants_prompt = num_top is not None and (asked.logprob_start_len or 0) >= 0 and asked.logprob_start_len is not None
    return extra | {
        "prompt": prompts, "stream": asked.stream, "max_tokens": sampling.max_new_tokens, "min_tokens": sampling.min_new_tokens,
        "seed": sampling.sampling_seed, "logprobs": num_top, "prompt_logprobs": num_top if wants_prompt else None,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip


def _prompts(asked: GenerateRequest) -> tuple[str, list[Any]]:
    """The field that has them, and one entry a prompt. RequestError 400."""
    if (asked.text is None) == (asked.input_ids is None):
        raise bad_value("text", "or `input_ids` must be there, and not both")
    field, value = ("text", asked.text) if asked.input_ids is None else ("input_ids", asked.input_ids)
    if not value:
        raise bad_value(field, "must not be empty")
    assert value is not None
    is_batch = isinstance(value, list) and isinstance(value[0], str | list)
    return field, list(value) if is_batch else [value]


def _images(asked: GenerateRequest, num_prompts: int) -> list[list[str]]:
    """Of each prompt. RequestError 400."""
    given: Any = asked.image_data or []
    if isinstance(given, str):
        given = [given]
    if num_prompts == 1 and all(isinstance(image, str) for image in given):
        given = [given]
    if given and len(given) != num_prompts:
        raise bad_value("image_data", "must have an entry a prompt")
    return [[images] if isinstance(images, str) else list(images or []) for images in given or [None] * num_prompts]


class Native:
    """What SGLang's clients ask of a server."""

    def __init__(self, service: Service):
        self._service = service

    def routes(self) -> list[DescribedRoute]:
        info = [DescribedRoute(path, self.model_info, "GET", schema.ModelInfo) for path in ("/get_model_info", "/model_info")]
        return [*info, DescribedRoute("/health_generate", self.health_generate, "GET", dict[str, str])]

    async def model_info(self) -> Any:
        """What is served, in SGLang's words."""
        model = self._service.config.model
        can = {"is_generation": True, "has_image_understanding": True, "has_audio_understanding": False}
        return {"model_path": model, "tokenizer_path": model, "weight_version": "default", **can}

    async def health_generate(self) -> Any:
        """200 when a token has been generated: for this request, or for another one if the queue is full or long."""
        client = self._service.client
        client.health.check()
        with contextlib.ExitStack() as undo:
            if client.has_room:
                params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
                submit = Submit(client.new_rid(), TextPrompt("a"), [], params, OutputOptions(), Stages(time.monotonic()))
                undo.callback(client.close, client.submit([submit]))
            try:
                async with asyncio.timeout(HEALTH_S):
                    await client.next_token()
            except TimeoutError:
                raise RequestError(503, "No token was generated in time.", code="stalled", retry_after=5) from None
        return {"status": "ok"}
