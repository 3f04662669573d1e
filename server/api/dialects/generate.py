"""SGLang's own dialect: `POST /generate`, a text completion with images in place of the prompt's placeholders."""

import functools
import re
import secrets
import time
from collections import Counter
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine.wire.messages import Event
from engine.wire.params import NumLogprobs
from engine.wire.updates import FIRST_VERSION
from server.api.chat.endpoint import Endpoint, GenerationEndpoint
from server.api.chat.format import CompletionFormat
from server.api.http.body import Body
from server.api.http.reply import Reply
from server.api.http.streaming import Choice, ReplyOptions, Usage, encode
from server.api.schema.media import media_ref
from server.api.schema.parts import FIRST
from server.api.schema.requests import GenerationRequest, Ids, check_prompts, prompts_of
from server.api.schema.validate import bad_value

Json = dict[str, Any]
Triple = tuple[float | None, int, str | None]
BARE = re.compile(r"[A-Za-z0-9+/_-]{64,}={0,2}")  # base64 without a `data:` prefix
GROWTH_PARTS = 256  # a long answer has an event each time it has grown by 1/256
RENAMED = {"lora_path": "model", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
Images = Annotated[list[str], FIRST]


class GenerateRequest(GenerationRequest):
    """The body of `POST /generate`: `text` or `input_ids`, of one prompt or of several. Members of `sampling_params` are read as fields,
    by the names of RENAMED."""

    text: str | Annotated[list[str], FIRST] | None = None
    input_ids: Ids | Annotated[list[Ids], FIRST] | None = None
    image_data: str | Images | Annotated[list[str | Images | None], FIRST] | None = None
    sampling_params: Json | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 63)] | None = 128
    return_logprob: bool | None = None
    return_text_in_logprobs: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None  # -1: none of the prompt
    top_logprobs_num: NumLogprobs | None = None
    logprobs: Literal[False] | None = None  # `return_logprob` instead

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, value: Json) -> Json:
        sampling = value.get("sampling_params")
        flat = {**value, **sampling} if isinstance(sampling, dict) else value
        return {RENAMED.get(name, name): one for name, one in flat.items()}

    @model_validator(mode="after")
    def _report_prompt(self) -> "GenerateRequest":
        if self.logprob_start_len is not None and self.logprob_start_len >= 0:
            self.prompt_logprobs = self.num_logprobs
        self.return_token_ids = True
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs_num or 0) if self.return_logprob else None

    @property
    def field(self) -> str:
        return "text" if self.input_ids is None else "input_ids"

    @property
    def prompts(self) -> list[Any]:
        return prompts_of(self.text if self.input_ids is None else self.input_ids)

    @property
    def is_batch(self) -> bool:
        return self.prompts not in ([self.text], [self.input_ids])

    def check_together(self, vocab_size: int) -> None:
        super().check_together(vocab_size)
        if (self.text is None) == (self.input_ids is None):
            raise bad_value("text", "either `text` or `input_ids` is required, and not both")
        check_prompts(self.prompts, self.field, vocab_size)

    def images(self) -> list[list[str]]:
        num_prompts, given = len(self.prompts), self.image_data
        is_one = num_prompts == 1 and (isinstance(given, str) or all(isinstance(image, str) for image in given or ()))
        entries: Any = [given] if is_one else given or [None] * num_prompts
        if isinstance(entries, str) or len(entries) != num_prompts:
            raise bad_value("image_data", "must have an entry per prompt")
        return [[images] if isinstance(images, str) else images or [] for images in entries]


class GenerateFormat(CompletionFormat):
    """Format in which every event contains the whole answer so far."""

    def __init__(self, options: ReplyOptions, asked: GenerateRequest):
        super().__init__(options)
        self._id, self._received, self._asked = secrets.token_hex(16), options.received, asked
        self._is_list = asked.is_batch or (asked.n or 1) > 1
        self._num_sent: Counter[int] = Counter()  # tokens of each choice in its last event

    def token_chunk(self, choice: Choice, event: Event, extra: Json) -> bytes:
        """Return an event if the answer has grown enough: one per token would take quadratic time."""
        choice.note_text(event)
        num_tokens = choice.usage.num_generated
        if event.finish_reason is None and num_tokens - self._num_sent[choice.index] < num_tokens // GROWTH_PARTS:
            return b""
        self._num_sent[choice.index] = num_tokens
        return b"data: " + encode(self._answer(choice, extra) | ({"index": choice.index} if self._is_list else {})) + b"\n\n"

    def document(self, choices: list[Choice], usage: Usage, timings: Json) -> bytes:
        found = [self._answer(choice, timings) for choice in choices]
        return encode(found if self._is_list else found[0])

    def _answer(self, choice: Choice, extra: Json) -> Json:
        usage, reason, matched = choice.usage, choice.finish_reason, choice.stop_reason
        if matched is None and reason == "stop" and choice.token_ids:
            matched = choice.token_ids[-1]
        endings: Json = {"length": {"length": usage.num_generated}, "stop": {"matched": matched}}
        meta: Json = {
            "id": self._id,
            "finish_reason": reason and {"type": reason, **endings.get(reason, {})}, "matched_stop": matched,
            "prompt_tokens": usage.num_prompt, "completion_tokens": usage.num_generated, "cached_tokens": usage.num_cached,
            "weight_version": FIRST_VERSION, **extra.get("metadata", {}), **self._logprobs(choice),
        }  # fmt: skip
        if reason is not None:
            meta["e2e_latency"] = time.monotonic() - self._received
        return {"text": "".join(choice.content), "output_ids": choice.token_ids, "meta_info": meta}

    def _logprobs(self, choice: Choice) -> Json:
        """Return triples of value, id, and text or null: for the tokens of prompt and answer, and for the most likely tokens at their
        positions."""
        start, found = self._asked.logprob_start_len or 0, dict[str, Any]()
        for name, scores, first in (("output", choice.logprobs, 0), ("input", choice.prompt_scores, start)):
            if scores:
                found[f"{name}_token_logprobs"] = [self._triple(one.id, one.token, one.logprob) for one in islice(scores, first, None)]
            if scores and self._asked.top_logprobs_num:
                tops = (one.top for one in islice(scores, first, None))
                found[f"{name}_top_logprobs"] = [[self._triple(*token) for token in top] or None for top in tops]
        return found

    def _triple(self, token_id: int, text: bytes, value: float | None) -> Triple:
        return value, token_id, text.decode("utf-8", "replace") if self._asked.return_text_in_logprobs else None


class GenerateEndpoint(GenerationEndpoint):
    """Continuations of texts or token ids, with images: SGLang's native endpoint."""

    takes = GenerateRequest

    def read(self, value: Json, body: Body) -> Reply:
        request = self.check(GenerateRequest, value)
        format = functools.partial(GenerateFormat, asked=request)
        reply = self.reply_to(request, body, request.prompts, request.field, format)
        for submit, images in zip(reply.submits, request.images(), strict=True):
            for i, image in enumerate(images):
                url = f"data:image/any;base64,{image}" if BARE.fullmatch(image) else image
                submit.media.append(media_ref(url, f"image_data.{i}", body))
        return reply


ROUTES: dict[str, type[Endpoint]] = {"/generate": GenerateEndpoint}
