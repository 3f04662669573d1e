"""SGLang's own dialect: `POST /generate` is translated to a text completion, with images in place of the prompt's placeholders."""

import asyncio
import functools
import re
import secrets
import time
from collections import Counter
from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.responses import Response

from engine.launch.config import VERSION
from engine.wire.messages import Abort, ErrorInfo, Event, Events, MediaRef, Submit, TextPrompt, TokenPrompt
from engine.wire.params import NumLogprobs, OutputOptions, SamplingParams
from engine.wire.reports import RankedToken, ranked_tokens
from engine.wire.stats import Stages
from engine.wire.updates import FIRST_VERSION
from server.errors import RequestError, error_body
from server.http.body import Body
from server.http.streaming import Choice, Format, ReplyOptions, Usage, encode
from server.http.validate import OneOf, Open, Worded, bad_value, check
from server.openai.endpoint import Endpoint, GenerationEndpoint, Job, Service
from server.openai.fields import limits_of, rest_of
from server.openai.media_refs import locate
from server.openai.openapi import DescribedRoute
from server.openai.parts import FIRST
from server.openai.schema import CompletionRequest, Ids, prompts_of

Json = dict[str, Any]
Triple = tuple[float | None, int, str | None]
BARE = re.compile(r"[A-Za-z0-9+/_-]{64,}={0,2}")  # base64 without a `data:` prefix
HEALTH_S = 20.0
GROWTH_PARTS = 256  # a long answer has an event each time it has grown by 1/256
LIMITED = limits_of(
    ((), "audio_data video_data input_embeds prompt_logprobs echo"),
    ((False,), "return_token_ids return_tokens_as_token_ids logprobs"),
    (([],), "token_ids_logprob"),
)
HARMLESS = ("modalities", "log_metrics", "image_max_dynamic_patch", "background")
IMAGES = "must be an image, a list of images, or for several prompts a list of either: URLs, or base64"
IDS = "must be a list of token ids, or of such lists"
Images = Annotated[list[str], FIRST]


class Sampling(Open):
    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    sampling_seed: int | None = None


class GenerateRequest(Open):
    """The body of `POST /generate`: `text` or `input_ids`, of one prompt or of several."""

    text: Annotated[str | Annotated[list[str], FIRST] | None, OneOf()] = None
    input_ids: Annotated[Ids | Annotated[list[Ids], FIRST] | None, OneOf(), Worded(IDS)] = None
    image_data: Annotated[str | Images | Annotated[list[str | Images | None], FIRST] | None, Worded(IMAGES)] = None
    sampling_params: Annotated[Sampling | None, Worded("must be an object")] = None
    return_logprob: bool | None = None
    return_text_in_logprobs: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None  # -1: none of the prompt
    top_logprobs_num: NumLogprobs | None = None
    stream: bool | None = None
    lora_path: str | None = None  # name of an adapter

    @property
    def value(self) -> Any:
        return self.text if self.input_ids is None else self.input_ids

    @property
    def is_batch(self) -> bool:
        return isinstance(self.value, list) and isinstance(self.value[0], str | list)

    @property
    def prompts(self) -> list[Any]:
        return prompts_of(self.value)

    def images(self, num_prompts: int) -> list[list[str]]:
        """Return the images of each prompt. RequestError 400."""
        given: Any = [self.image_data] if isinstance(self.image_data, str) else self.image_data or []
        if num_prompts == 1 and all(isinstance(image, str) for image in given):
            given = [given]
        if given and len(given) != num_prompts:
            raise bad_value("image_data", "must have an entry per prompt")
        return [[images] if isinstance(images, str) else list(images or []) for images in given or [None] * num_prompts]


class AbortRequest(BaseModel):
    rid: str | None = None
    abort_all: bool | None = None


class Generated(BaseModel):
    text: str
    output_ids: list[int]
    meta_info: Json


class GenerateFormat(Format):
    """Format in which every event contains the whole answer so far."""

    def __init__(self, options: ReplyOptions, asked: GenerateRequest, request: CompletionRequest, version: str = FIRST_VERSION):
        self._id = request.rid or secrets.token_hex(16)
        self._received, self._asked, self._is_list = options.received, asked, asked.is_batch or (request.n or 1) > 1
        self._version = version
        self._num_sent: Counter[int] = Counter()  # tokens of each choice in its last event

    def first_chunk(self, choice: Choice) -> bytes:
        return b""

    def token_chunk(self, choice: Choice, event: Event) -> bytes:
        """Return an event if the answer has grown enough: one per token would take quadratic time."""
        choice.note_text(event)
        num_tokens = choice.usage.num_generated
        if event.finish_reason is not None or num_tokens - self._num_sent[choice.index] < num_tokens // GROWTH_PARTS:
            return b""
        self._num_sent[choice.index] = num_tokens
        return self._event(choice)

    def finish_chunk(self, choice: Choice, timings: Json) -> bytes:
        self._note(timings)
        return self._event(choice)

    def end(self, usage: Usage, timings: Json) -> bytes:
        return b"data: [DONE]\n\n"

    def document(self, choices: list[Choice], usage: Usage, timings: Json) -> bytes:
        self._note(timings)
        found = [self._answer(choice) for choice in choices]
        return encode(found if self._is_list else found[0])

    def error_chunk(self, info: ErrorInfo) -> bytes:
        return b"data: " + error_body(info) + b"\n\n"

    def _note(self, extra: Json) -> None:
        self._version = extra.get("metadata", {}).get("weight_version", self._version)

    def _event(self, choice: Choice) -> bytes:
        return b"data: " + encode(self._answer(choice) | ({"index": choice.index} if self._is_list else {})) + b"\n\n"

    def _answer(self, choice: Choice) -> Json:
        usage, reason, matched = choice.usage, choice.finish_reason, choice.stop_reason
        if matched is None and reason == "stop" and choice.token_ids:
            matched = choice.token_ids[-1]
        endings: Json = {"length": {"length": usage.num_generated}, "stop": {"matched": matched}}
        ending = None if reason is None else {"type": reason, **endings.get(reason, {})}
        meta: Json = {
            "id": self._id, "finish_reason": ending, "matched_stop": matched, "prompt_tokens": usage.num_prompt,
            "completion_tokens": usage.num_generated, "cached_tokens": usage.num_cached, "weight_version": self._version,
            **({} if reason is None else {"e2e_latency": time.monotonic() - self._received}), **self._logprobs(choice),
        }  # fmt: skip
        return {"text": "".join(choice.content), "output_ids": choice.token_ids, "meta_info": meta}

    def _logprobs(self, choice: Choice) -> Json:
        """Return triples of value, id, and text or null: for the tokens of prompt and answer, and for the most likely tokens at their
        positions."""
        start, has_top = self._asked.logprob_start_len or 0, bool(self._asked.top_logprobs_num)
        found: Json = {}
        if choice.logprobs:
            found["output_token_logprobs"] = [self._named(entry.logprob, entry.token) for entry in choice.logprobs]
            found["output_top_logprobs"] = [[self._named(value, name) for name, value in entry.top] for entry in choice.logprobs]
        if entries := ranked_tokens(choice.reports):
            pairs = list(zip(choice.prompt_ids, entries, strict=True))[start:]
            found["input_token_logprobs"] = [self._triple(*entry[:1]) if entry else (None, token_id, None) for token_id, entry in pairs]
            likely = [[self._triple(token) for token in entry if token.rank is not None] for _, entry in pairs]
            found["input_top_logprobs"] = [tokens or None for tokens in likely]
        return {name: value for name, value in found.items() if has_top or "_top_" not in name}

    def _named(self, value: float | None, name: bytes) -> Triple:
        token_id, _, text = name.partition(b":")
        return value, int(token_id), text.decode("utf-8", "replace") if self._asked.return_text_in_logprobs else None

    def _triple(self, token: RankedToken) -> Triple:
        return self._named(token.logprob, b"%d:%b" % (token.id, token.text))


def completion_body(asked: GenerateRequest) -> Json:
    """Return the JSON of a text completion. RequestError 400."""
    sampling = asked.sampling_params or Sampling()
    num_top = (asked.top_logprobs_num or 0) if asked.return_logprob else None
    start = -1 if asked.logprob_start_len is None else asked.logprob_start_len
    return {
        **rest_of(asked.model_extra, LIMITED, HARMLESS), **rest_of(sampling.model_extra, LIMITED, HARMLESS), "prompt": asked.prompts,
        "stream": asked.stream, "max_tokens": sampling.max_new_tokens, "min_tokens": sampling.min_new_tokens,
        "seed": sampling.sampling_seed, "logprobs": num_top, "prompt_logprobs": None if start < 0 else num_top, "return_token_ids": True,
        **({} if asked.lora_path is None else {"model": asked.lora_path}),
    }  # fmt: skip


class GenerateEndpoint(GenerationEndpoint):
    """Continuations of texts or token ids, with images: SGLang's native endpoint."""

    takes, gives, streams = GenerateRequest, Generated | list[Generated], Generated
    last_data, format = "[DONE]", GenerateFormat

    def read(self, value: Json, body: Body) -> Job:
        asked = check(GenerateRequest, value)
        if (asked.text is None) == (asked.input_ids is None):
            raise bad_value("text", "either `text` or `input_ids` is required, and not both")
        field = "text" if asked.input_ids is None else "input_ids"
        if not asked.value:
            raise bad_value(field, "must not be empty")
        try:
            request = self.check(CompletionRequest, completion_body(asked))
        except RequestError as error:
            raise error if error.info.param != "prompt" else bad_value(field, error.info.message.partition(": ")[2]) from None
        prompts = [TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt) for prompt in asked.prompts]
        job = self.job_of(request, body, prompts, field, names="both")
        version = self.service.client.metadata.get("weight_version", FIRST_VERSION)
        job.format = functools.partial(GenerateFormat, asked=asked, request=request, version=version)
        for submit, images in zip(job.submits, asked.images(len(prompts)), strict=True):
            for i, image in enumerate(images):
                url = f"data:image/any;base64,{image}" if BARE.fullmatch(image) else image
                submit.media.append(MediaRef(*locate(url, f"image_data.{i}", body, job.used)))
        return job


ROUTES: dict[str, type[Endpoint]] = {"/generate": GenerateEndpoint}


class Native:
    """Endpoints that SGLang's clients request."""

    def __init__(self, service: Service):
        self._service = service

    def routes(self) -> list[DescribedRoute]:
        gets = {"/get_model_info": self.model_info, "/model_info": self.model_info, "/get_server_info": self.server_info}
        routes = [DescribedRoute(path, method, "GET", Json) for path, method in {**gets, "/health_generate": self.health_generate}.items()]
        return [*routes, DescribedRoute("/abort_request", self.abort_request, "POST", response_class=Response)]

    async def model_info(self) -> Any:
        """The served model, in SGLang's form."""
        model, version = self._service.config.model, self._service.client.metadata.get("weight_version", FIRST_VERSION)
        can = {"is_generation": True, "has_image_understanding": True, "has_audio_understanding": False}
        return {"model_path": model, "tokenizer_path": model, "weight_version": version, "preferred_sampling_params": None, **can}

    async def server_info(self) -> Any:
        """Statistics for SGLang's benchmark."""
        stats = self._service.client.stats
        accepted = stats.tokens_per_verified_row
        states = [{"avg_spec_accept_length": accepted, "num_running_reqs": stats.num_running, "num_waiting_reqs": stats.num_waiting}]
        return {**await self.model_info(), "version": VERSION, "max_total_num_tokens": stats.max_model_len, "internal_states": states}

    async def abort_request(self, asked: AbortRequest) -> Response:
        """Abort the requests with this `rid`, or all requests."""
        client = self._service.client
        streams = [stream for stream in client.replies if asked.abort_all or (asked.rid and stream.name == asked.rid)]
        for rid, index in [answer for stream in streams for answer in stream.open]:
            client.send(Abort(rid, index=index))
            client.dispatch(Events([Event(rid, finish_reason="abort", index=index)]))
        return Response()

    async def health_generate(self) -> Any:
        """200 when a token has been generated: for this request, or for another one if the queue is full or long."""
        client = self._service.client
        client.health.check()
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        fields: Json = {"params": params, "output": OutputOptions(), "stages": Stages(time.monotonic())}
        submit = Submit(client.new_rid(), TextPrompt("a"), [], **fields)
        stream = client.submit([submit]) if client.has_capacity else None
        try:
            async with asyncio.timeout(HEALTH_S):
                await client.next_token()
        except TimeoutError:
            raise RequestError(503, "No token was generated in time.", code="stalled", retry_after=5) from None
        finally:
            if stream is not None:
                client.close(stream)
        return {"status": "ok"}
