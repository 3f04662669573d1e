"""The bytes of a chat completion: SSE chunks of a stream, or one JSON document. Called by `server/api/chat.py`.

The hot path is `token_chunk`: everything but the text is formatted once per stream. Fields of thoughts are only in answers that have some.
"""

import msgspec

from engine.messages import ErrorInfo, Event, Stages
from server.errors import error_body

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode

# The consecutive stages of the critical path: name and the boundary at which each ends.
STAGES = (
    ("prepare", "submitted"),
    ("queue", "admitted"),
    ("launch", "launched"),
    ("prefill", "prefilled"),
    ("sample", "first_token"),
    ("reply", "sent"),
)


class Usage(msgspec.Struct):
    """Token counts of a request so far."""

    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_reasoning: int = 0  # of the generated ones

    def note(self, event: Event) -> None:
        self.num_prompt = event.num_prompt_tokens or self.num_prompt
        self.num_cached = event.num_cached_tokens or self.num_cached
        self.num_generated = event.num_tokens or self.num_generated
        if event.is_reasoning:
            self.num_reasoning = event.num_tokens

    def json(self) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": self.num_prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        return usage | {"completion_tokens_details": {"reasoning_tokens": self.num_reasoning}} if self.num_reasoning else usage


def stage_times(stages: Stages, started: float) -> dict[str, float]:
    """Seconds of each stage of the critical path, from the first byte of the body to the first text at the socket. They add up."""
    times = {"receive": stages.received - started}
    previous = stages.received
    boundaries = msgspec.structs.asdict(stages)
    for name, boundary in STAGES:
        reached = max(previous, boundaries[boundary])
        times[name] = reached - previous
        previous = reached
    return times


def timings_json(stages: Stages, started: float) -> dict[str, float]:
    """`timings` of a response: milliseconds of each stage, device milliseconds of the overlapped work, images that were in no cache."""
    timings = {f"{name}_ms": round(1000 * seconds, 3) for name, seconds in stage_times(stages, started).items()}
    device = {"device_decode_ms": stages.decode_ms, "device_encode_ms": stages.encode_ms, "device_forward_ms": stages.forward_ms}
    return timings | {name: round(value, 3) for name, value in device.items()} | {"images_encoded": stages.images_encoded}


class ChunkFormatter:
    """Formats the chunks of one stream. Every method returns whole SSE messages."""

    def __init__(self, completion_id: str, created: int, model: str, include_usage: bool, continuous_usage: bool):
        self._head = {"id": completion_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._continuous_usage = continuous_usage
        self._include_usage = include_usage
        prefix = _encode(self._head)[:-1]
        self._token_head = b"data: " + prefix + b',"choices":[{"index":0,"delta":{'
        self._token_tail = b'},"logprobs":null,"finish_reason":null}]'
        self._plain_end = (b',"usage":null' if include_usage else b"") + b"}\n\n"

    def role_chunk(self, usage: Usage) -> bytes:
        return self._choice_chunk({"role": "assistant", "content": ""}, None, usage, {})

    def token_chunk(self, text: str, is_reasoning: bool, usage: Usage) -> bytes:
        """One token's text; it may be empty while the text waits for the rest of a character or of a stop string."""
        end = b',"usage":' + _encode(usage.json()) + b"}\n\n" if self._continuous_usage else self._plain_end
        value = _encode(text)
        delta = b'"reasoning":' + value + b',"reasoning_content":' + value if is_reasoning else b'"content":' + value
        return self._token_head + delta + self._token_tail + end

    def finish_chunk(self, reason: str, usage: Usage, timings: dict[str, object]) -> bytes:
        return self._choice_chunk({}, reason, usage, {} if self._include_usage else timings)

    def usage_chunk(self, usage: Usage, timings: dict[str, object]) -> bytes:
        """The last chunk of a stream that asked for usage, else nothing."""
        if not self._include_usage:
            return b""
        return b"data: " + _encode({**self._head, "choices": [], "usage": usage.json(), **timings}) + b"\n\n"

    def _choice_chunk(self, delta: dict[str, str], reason: str | None, usage: Usage, extra: dict[str, object]) -> bytes:
        chunk: dict[str, object] = {**self._head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
        if self._include_usage or self._continuous_usage:
            chunk["usage"] = usage.json() if self._continuous_usage else None
        return b"data: " + _encode(chunk | extra) + b"\n\n"


def error_chunk(info: ErrorInfo) -> bytes:
    """An error after the headers are out: a chunk with a top-level `error`; the stream ends after it."""
    return b"data: " + error_body(info) + b"\n\n"


def message_json(content: str, reasoning: str, usage: Usage) -> dict[str, object]:
    """The message of a response that is not streamed. One that thought and came to no answer has no content."""
    if not usage.num_reasoning:
        return {"role": "assistant", "content": content, "refusal": None}
    return {"role": "assistant", "content": content or None, "refusal": None, "reasoning": reasoning, "reasoning_content": reasoning}


def completion_json(
    completion_id: str, created: int, model: str, message: dict[str, object], reason: str, usage: Usage, timings: dict[str, object]
) -> bytes:
    """The body of a response that is not streamed."""
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    head = {"id": completion_id, "object": "chat.completion", "created": created, "model": model}
    return _encode({**head, "choices": [choice], "usage": usage.json(), **timings})
