"""The bytes of an answer in SGLang's own dialect: a document, a list of them, or events that each hold all there is so far."""

import secrets
import time
from collections import Counter

from engine.wire.messages import ErrorInfo, Event, Logprob
from server.errors import error_body
from server.http.sse import Choice, Format, ReplyOptions, Usage, encode

GROWTH_PARTS = 256  # a long answer has an event when it has grown by one of so many parts
DONE = b"data: [DONE]\n\n"
Json = dict[str, object]
Triple = tuple[float | None, int, None]  # value, id, and where others have a text


class GenerateFormat(Format):
    def __init__(self, options: ReplyOptions):
        self._id = secrets.token_hex(16)
        self._received, self._told = options.received, options.echo
        self._num_sent: Counter[int] = Counter()  # tokens of each choice in its last event

    def first_chunk(self, choice: Choice) -> bytes:
        return b""

    def token_chunk(self, choice: Choice, event: Event) -> bytes:
        """An event holds all there is so far: one per token would take quadratic time."""
        choice.note_text(event)
        num_tokens = choice.usage.num_generated
        if event.finish_reason is not None or num_tokens - self._num_sent[choice.index] < num_tokens // GROWTH_PARTS:
            return b""
        self._num_sent[choice.index] = num_tokens
        return self._event(choice)

    def finish_chunk(self, choice: Choice, timings: Json) -> bytes:
        return self._event(choice)

    def end(self, usage: Usage, timings: Json) -> bytes:
        return DONE

    def document(self, choices: list[Choice], usage: Usage, timings: Json) -> bytes:
        found = [self._answer(choice) for choice in choices]
        return encode(found if self._told["is_list"] else found[0])

    def error_chunk(self, info: ErrorInfo) -> bytes:
        return b"data: " + error_body(info) + b"\n\n"

    def _event(self, choice: Choice) -> bytes:
        extra = {"index": choice.index} if self._told["is_list"] else {}
        return b"data: " + encode({**self._answer(choice), **extra}) + b"\n\n"

    def _answer(self, choice: Choice) -> Json:
        usage = choice.usage
        meta: Json = {
            "id": self._id, "finish_reason": _finish(choice), "prompt_tokens": usage.num_prompt, "completion_tokens": usage.num_generated,
            "cached_tokens": usage.num_cached, "weight_version": "default",
        }  # fmt: skip
        if choice.finish_reason is not None:
            meta["e2e_latency"] = time.monotonic() - self._received
        return {"text": "".join(choice.content), "output_ids": choice.token_ids, "meta_info": meta | self._logprobs(choice)}

    def _logprobs(self, choice: Choice) -> Json:
        found: Json = {}
        if choice.logprobs:
            found["output_token_logprobs"] = [(entry.logprob, _id(entry.token), None) for entry in choice.logprobs]
            if self._told["num_top"]:
                found["output_top_logprobs"] = [_top(entry) for entry in choice.logprobs]
        if choice.prompt_logprobs:
            start = self._told["start"]
            pairs = list(zip(choice.prompt_ids, choice.prompt_logprobs, strict=True))[start:]
            found["input_token_logprobs"] = [(place[0].logprob if place else None, token_id, None) for token_id, place in pairs]
            if self._told["num_top"]:
                likely = [[(token.logprob, token.id, None) for token in place if token.rank is not None] for _, place in pairs]
                found["input_top_logprobs"] = [place or None for place in likely]
        return found


def _finish(choice: Choice) -> Json | None:
    if choice.finish_reason is None:
        return None
    if choice.finish_reason == "length":
        return {"type": "length", "length": choice.usage.num_generated}
    matched = choice.stop_reason if choice.stop_reason is not None else choice.token_ids[-1] if choice.token_ids else None
    return {"type": "stop", "matched": matched}


def _id(name: bytes) -> int:
    """Of a token whose log-probability is told by its id."""
    return int(name.removeprefix(b"token_id:"))


def _top(entry: Logprob) -> list[Triple]:
    return [(value, _id(name), None) for name, value in entry.top]
