"""The bytes of an answer: SSE chunks of a stream, or one JSON document, of a chat or of a text completion. Used by `reply.py`.

The hot path is `token_chunk`: everything but the text is formatted once a choice. Fields of thoughts and calls are only in answers that
have some.
"""

import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import msgspec

from engine.messages import (
    CallDelta,
    ErrorInfo,
    Event,
    Logprob,
)
from engine.stats import Stages
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
    """Token counts of a choice so far."""

    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_reasoning: int = 0  # of the generated ones

    def note(self, event: Event) -> None:
        if event.num_prompt_tokens:  # with the first and the last event
            self.num_prompt, self.num_cached = event.num_prompt_tokens, event.num_cached_tokens
        self.num_generated = event.num_tokens or self.num_generated
        if event.is_reasoning:
            self.num_reasoning = event.num_tokens

    def add(self, other: "Usage", with_prompt: bool) -> None:
        """Counts another choice too."""
        self.num_prompt += other.num_prompt * with_prompt
        self.num_cached += other.num_cached * with_prompt
        self.num_generated += other.num_generated
        self.num_reasoning += other.num_reasoning

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


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come."""

    index: int
    usage: Usage = field(default_factory=Usage)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list["Call"] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    num_characters: int = 0  # of the tokens whose log-probabilities were told
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_time: float = 0.0  # when its last tokens came

    def note(self, event: Event) -> None:
        """Takes in all of an event but its text and log-probabilities, which a stream has no use for."""
        self.usage.note(event)
        for delta in event.calls:
            if delta.name is not None:
                self.calls.append(Call(delta.name))
            self.calls[delta.index].arguments.append(delta.arguments)
        if event.finish_reason is not None:
            has_calls = bool(self.calls) and (self.calls[-1].is_whole or not isinstance(event.stop_reason, str))  # no stop string cut it
            self.finish_reason = "tool_calls" if has_calls and event.finish_reason == "stop" else event.finish_reason
            self.stop_reason = event.stop_reason

    def note_text(self, event: Event) -> None:
        (self.reasoning if event.is_reasoning else self.content).append(event.text)
        self.logprobs += event.logprobs


class Call:
    """A tool call, with the id that the client answers to."""

    def __init__(self, name: str):
        self.id = f"call_{secrets.token_hex(12)}"
        self.name = name
        self.arguments: list[str] = []

    @property
    def is_whole(self) -> bool:
        """Whether a client can read its arguments."""
        try:
            msgspec.json.decode("".join(self.arguments))
        except (ValueError, RecursionError):
            return False
        return True

    def json(self) -> dict[str, object]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": "".join(self.arguments)}}


class Format(ABC):
    """How one endpoint's answers look. Every method that returns bytes returns whole SSE messages, or the whole document."""

    @abstractmethod
    def __init__(self, created: int, model: str, include_usage: bool, continuous_usage: bool):
        """Of one answer, however many choices it has."""

    @abstractmethod
    def first_chunk(self, choice: Choice) -> bytes:
        """Before the first token."""

    @abstractmethod
    def token_chunk(self, choice: Choice, event: Event) -> bytes:
        """One token's text; it may be empty while the text waits for the rest of a character or of a stop string."""

    @abstractmethod
    def finish_chunk(self, choice: Choice, timings: dict[str, object]) -> bytes:
        """Why a choice ended."""

    @abstractmethod
    def end(self, usage: Usage, timings: dict[str, object]) -> bytes:
        """Behind all choices."""

    @abstractmethod
    def document(self, choices: list[Choice], usage: Usage, timings: dict[str, object]) -> bytes:
        """The body of a response that is not streamed."""

    @abstractmethod
    def error_chunk(self, info: ErrorInfo) -> bytes:
        """An error after the headers are out; the stream ends after it."""


class OpenAIFormat(Format):
    """What chat and text completions have in common: chunks without `event:` lines."""

    id_prefix: str
    chunk_object: str
    document_object: str

    def __init__(self, created: int, model: str, include_usage: bool, continuous_usage: bool):
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self._created, self._model = created, model
        self._head = {"id": self.id, "object": self.chunk_object, "created": created, "model": model}
        self._prefix = b"data: " + _encode(self._head)[:-1]
        self._continuous_usage = continuous_usage
        self._include_usage = include_usage
        self._plain_end = (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._openings: dict[int, bytes] = {}  # of token chunks, by choice

    @abstractmethod
    def last_delta(self) -> dict[str, object]:
        """What the chunk of a finish reason says beside it."""

    @abstractmethod
    def document_choice(self, choice: Choice) -> dict[str, object]:
        """What a document says of a choice, log-probabilities included, but for why it ended."""

    def finish_chunk(self, choice: Choice, timings: dict[str, object]) -> bytes:
        end = {"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return self._chunk({"index": choice.index, **self.last_delta(), **end}, choice.usage, {} if self._include_usage else timings)

    def end(self, usage: Usage, timings: dict[str, object]) -> bytes:
        """A chunk of usage in a stream that asked for it."""
        if not self._include_usage:
            return DONE
        return b"data: " + _encode({**self._head, "choices": [], "usage": usage.json(), **timings}) + b"\n\n" + DONE

    def error_chunk(self, info: ErrorInfo) -> bytes:
        """A chunk with a top-level `error`."""
        return b"data: " + error_body(info) + b"\n\n"

    def document(self, choices: list[Choice], usage: Usage, timings: dict[str, object]) -> bytes:
        ends = [{"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason} for choice in choices]
        said = [{"index": c.index, **self.document_choice(c), **end} for c, end in zip(choices, ends, strict=True)]
        head = {"id": self.id, "object": self.document_object, "created": self._created, "model": self._model}
        return _encode({**head, "choices": said, "usage": usage.json(), **timings})

    def _chunk(self, choice: dict[str, object], usage: Usage, extra: dict[str, object]) -> bytes:
        chunk: dict[str, object] = {**self._head, "choices": [choice]}
        if self._include_usage or self._continuous_usage:
            chunk["usage"] = usage.json() if self._continuous_usage else None
        return b"data: " + _encode(chunk | extra) + b"\n\n"

    def _end(self, usage: Usage) -> bytes:
        return b',"usage":' + _encode(usage.json()) + b"}\n\n" if self._continuous_usage else self._plain_end

    def _opening(self, choice: Choice, rest: bytes) -> bytes:
        """What stands before the text of a token of this choice."""
        opening = self._openings.get(choice.index)
        if opening is None:
            opening = self._openings[choice.index] = self._prefix + b',"choices":[{"index":%d,' % choice.index + rest
        return opening


class ChatFormat(OpenAIFormat):
    """Messages, with thoughts and tool calls beside the content."""

    id_prefix, chunk_object, document_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def first_chunk(self, choice: Choice) -> bytes:
        said = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._chunk(said, choice.usage, {})

    def token_chunk(self, choice: Choice, event: Event) -> bytes:
        value = _encode(event.text)
        logprobs = _encode({"content": [_logprob_json(entry) for entry in event.logprobs], "refusal": None}) if event.logprobs else b"null"
        delta = b'"reasoning":' + value + b',"reasoning_content":' + value if event.is_reasoning else b'"content":' + value
        if event.calls:
            calls = _encode([_delta_json(choice, call) for call in event.calls])
            delta = (delta + b"," if event.text else b"") + b'"tool_calls":' + calls
        end = b'},"logprobs":' + logprobs + b',"finish_reason":null}]' + self._end(choice.usage)
        return self._opening(choice, b'"delta":{') + delta + end

    def last_delta(self) -> dict[str, object]:
        return {"delta": {}}

    def document_choice(self, choice: Choice) -> dict[str, object]:
        """A message that thought, or called, and came to no answer has no content."""
        content = "".join(choice.content)
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if choice.usage.num_reasoning:
            reasoning = "".join(choice.reasoning)
            message |= {"content": content or None, "reasoning": reasoning, "reasoning_content": reasoning}
        if choice.calls:
            message |= {"content": content or None, "tool_calls": [call.json() for call in choice.calls]}
        logprobs = {"content": [_logprob_json(entry) for entry in choice.logprobs], "refusal": None} if choice.logprobs else None
        return {"message": message, "logprobs": logprobs}


class CompletionFormat(OpenAIFormat):
    """Plain text."""

    id_prefix, chunk_object, document_object = "cmpl", "text_completion", "text_completion"

    def first_chunk(self, choice: Choice) -> bytes:
        return b""

    def token_chunk(self, choice: Choice, event: Event) -> bytes:
        logprobs = _encode(_completion_logprobs(event.logprobs, choice)) if event.logprobs else b"null"
        text = self._opening(choice, b'"text":') + _encode(event.text)
        return text + b',"logprobs":' + logprobs + b',"finish_reason":null}]' + self._end(choice.usage)

    def last_delta(self) -> dict[str, object]:
        return {"text": ""}

    def document_choice(self, choice: Choice) -> dict[str, object]:
        logprobs = _completion_logprobs(choice.logprobs, choice) if choice.logprobs else None
        return {"text": "".join(choice.content), "logprobs": logprobs}


def _delta_json(choice: Choice, delta: CallDelta) -> dict[str, object]:
    """A piece of a call: its id, type and name come once."""
    function: dict[str, object] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    return {"index": delta.index, "id": choice.calls[delta.index].id, "type": "function", "function": {"name": delta.name} | function}


def _logprob_json(entry: Logprob) -> dict[str, object]:
    """Of one token of a chat."""
    top = [{"token": _text(token), "logprob": value, "bytes": list(token)} for token, value in entry.top]
    return {"token": _text(entry.token), "logprob": entry.logprob, "bytes": list(entry.token), "top_logprobs": top}


def _completion_logprobs(entries: list[Logprob], choice: Choice) -> dict[str, object]:
    """Of tokens of a text completion, in parallel lists. A token is among the likely ones of its place in any case."""
    offsets = []
    for entry in entries:
        offsets.append(choice.num_characters)
        choice.num_characters += len(_text(entry.token))
    return {
        "text_offset": offsets,
        "tokens": [_text(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_likely(entry) for entry in entries],
    }


def _likely(entry: Logprob) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    return {_text(token): value for token, value in reversed(entry.top)} | {_text(entry.token): entry.logprob}


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
