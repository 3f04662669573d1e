"""Formats of streams and documents, common to all dialects: the state of each choice, and the `Format` that serialises it."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from engine.wire.messages import ErrorInfo, Event, Logprob
from engine.wire.params import SamplingParams
from engine.wire.reports import TokenScores
from engine.wire.stats import Stages, TokenDetails

encode = msgspec.json.Encoder().encode
decode_entries = msgspec.msgpack.Decoder(list[Logprob]).decode

# Stages of the critical path, and the boundary at which each ends.
STAGES = {
    "prepare": "submitted", "queue": "admitted", "launch": "launched", "prefill": "prefilled", "sample": "first_token", "reply": "sent",
}  # fmt: skip


class Usage(msgspec.Struct):
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_reasoning: int = 0  # part of the generated tokens
    details: TokenDetails = msgspec.field(default_factory=TokenDetails)

    def note(self, event: Event) -> None:
        if event.num_prompt_tokens:  # set in the first and the last event
            self.num_prompt, self.num_cached = event.num_prompt_tokens, event.num_cached_tokens
        self.num_generated = event.num_tokens or self.num_generated
        if event.is_reasoning:
            self.num_reasoning = event.num_tokens
        self.details = event.details or self.details

    def add(self, other: "Usage", with_prompt: bool) -> None:
        self.num_prompt += other.num_prompt * with_prompt
        self.num_cached += other.num_cached * with_prompt
        self.num_generated += other.num_generated
        self.num_reasoning += other.num_reasoning
        self.details.add(other.details)


def stage_times(stages: Stages, started: float) -> dict[str, float]:
    """Return the seconds of each stage, from the first byte of the body to the first text at the socket. They add up to the total."""
    times = {"receive": stages.received - started}
    previous = stages.received
    boundaries = msgspec.structs.asdict(stages)
    for name, boundary in STAGES.items():
        reached = max(previous, boundaries[boundary])
        times[name] = reached - previous
        previous = reached
    return times


def timings_json(stages: Stages, started: float) -> dict[str, float]:
    """Return `timings` of a response: milliseconds of each stage, device milliseconds of the overlapped work, images that were in no cache,
    and counts of media."""
    timings = {f"{name}_ms": round(1000 * seconds, 3) for name, seconds in stage_times(stages, started).items()}
    device = {"device_decode_ms": stages.decode_ms, "device_encode_ms": stages.encode_ms, "device_forward_ms": stages.forward_ms}
    return timings | {name: round(value, 3) for name, value in device.items()} | {"images_encoded": stages.images_encoded}


class Call:
    def __init__(self, name: str):
        self.id = f"call_{secrets.token_hex(12)}"
        self.name = name
        self.arguments = ""

    @property
    def is_whole(self) -> bool:
        try:
            msgspec.json.decode(self.arguments)
        except (ValueError, RecursionError):
            return False
        return True


class Scores:
    """Log-probabilities of tokens as msgpack, which takes a twentieth of the memory of objects."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __iter__(self) -> Iterator[Logprob]:
        for piece in self._pieces:
            yield from decode_entries(piece)

    def add(self, entries: list[Logprob]) -> None:
        if entries:
            self._pieces.append(msgspec.msgpack.encode(entries))


@dataclass(slots=True)
class Choice:
    index: int
    usage: Usage = field(default_factory=Usage)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logprobs: Scores = field(default_factory=Scores)
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    prompt_scores: Scores = field(default_factory=Scores)
    num_characters: int = 0  # characters of tokens with reported log-probabilities
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_time: float = 0.0  # when its last tokens arrived

    def note(self, event: Event) -> None:
        """Record an event, except its text and log-probabilities, which a stream does not need."""
        self.usage.note(event)
        self.prompt_ids = event.prompt_ids or self.prompt_ids
        for delta in event.calls:
            if delta.name is not None:
                self.calls.append(Call(delta.name))
            self.calls[delta.index].arguments += delta.arguments
        if event.finish_reason is not None:
            has_calls = bool(self.calls) and (self.calls[-1].is_whole or not isinstance(event.stop_reason, str))  # no stop string cut it
            self.finish_reason = "tool_calls" if has_calls and event.finish_reason == "stop" else event.finish_reason
            self.stop_reason = event.stop_reason

    def note_text(self, event: Event) -> None:
        (self.reasoning if event.is_reasoning else self.content).append(event.text)
        self.logprobs.add(event.logprobs)
        self.token_ids += event.token_ids
        if isinstance(event.report, TokenScores):
            self.prompt_scores.add(event.report.entries)

    def blocks(self) -> Iterator[tuple[str, str, Call | None]]:
        """Yield kind, text and call of each block: `thinking`, `text`, then each `call` with its arguments as text."""
        for kind, pieces in (("thinking", self.reasoning), ("text", self.content)):
            if text := "".join(pieces):
                yield kind, text, None
        for call in self.calls:
            yield "call", call.arguments, call


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """Options of a response, and the arrival time of its body."""

    model: str
    created: int
    started: float = 0.0  # first and last byte of the body
    received: float = 0.0
    is_streamed: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    timings: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    hides_reasoning: bool = False
    drops_empty: bool = False  # no chunk for a token with held-back text, such as the first thirty of a tool call


class Format(ABC):
    """Serialisation of an answer. Methods that return bytes return complete SSE messages or the whole document."""

    ping = b": ping\n\n"  # keeps an idle connection open

    @abstractmethod
    def first_chunk(self, choice: Choice) -> bytes: ...

    @abstractmethod
    def token_chunk(self, choice: Choice, event: Event, extra: dict[str, object]) -> bytes:
        """Return a chunk with one token's text, which is empty while the text may be part of a character or of a stop string. The chunk of
        the answer's last event has its `finish_reason` and the members of `extra`."""

    @abstractmethod
    def end(self, usage: Usage, timings: dict[str, object]) -> bytes: ...

    @abstractmethod
    def document(self, choices: list[Choice], usage: Usage, timings: dict[str, object]) -> bytes: ...

    @abstractmethod
    def error_chunk(self, info: ErrorInfo) -> bytes:
        """Return an error that occurs after the headers have been sent; it ends the stream."""


MakeFormat = Callable[[ReplyOptions], Format]
