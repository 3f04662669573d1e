"""The api process's bookkeeping: which client waits for which request, and which bodies are in use."""

import asyncio
import itertools
import time
from collections import Counter
from typing import Literal

import msgspec
from starlette.requests import ClientDisconnect

from engine.wire.arena import Arena
from engine.wire.ipc import Outbox
from engine.wire.messages import Abort, ErrorInfo, Event, Events, Payload, Region, Submit, ToProcessor
from engine.wire.stats import EngineStats
from server.errors import RequestError, overloaded

HEARTBEAT_STALE_S = 7.0
MAX_UNREAD_EVENTS = 1 << 18  # a few hundred bytes each
MAX_PROMPTS_BYTES = 16 << 20  # of a request's prompts, each with its copy of the text that they share


def check_prompts_bytes(num_bytes: int) -> None:
    """Raise RequestError 413 if the prompts of a list, of which each has its copy of shared text, exceed MAX_PROMPTS_BYTES."""
    if num_bytes > MAX_PROMPTS_BYTES:
        words = f"The prompts of this request, each with the text that they share, exceed {MAX_PROMPTS_BYTES >> 20} MiB."
        raise RequestError(413, f"{words} Send several requests.")


class Stream:
    """Events of one client's choices, in order; the last event of a choice is terminal. The engine identifies a choice by (rid, index), the
    client by a number."""

    def __init__(self, answers: list[tuple[int, int]]):
        self.choices = {answer: number for number, answer in enumerate(answers)}
        self.open = set(answers)  # without a terminal event yet
        self._events: list[Event] = []
        self.num_unread = 0  # events that wait for `next`; each log-probability counts as one
        self._is_changed = asyncio.Event()  # set while there are events, and after a disconnect
        self._disconnected = False

    async def next(self) -> list[Event]:
        """Return all events since the last call, at least one. ClientDisconnect."""
        await self._is_changed.wait()
        if self._disconnected:
            raise ClientDisconnect
        self._is_changed.clear()
        events, self._events = self._events, []
        self.num_unread = 0
        return events

    def push(self, event: Event) -> None:
        if event.error is not None:  # it ends all answers to the request
            ended = {answer for answer in self.open if answer[0] == event.rid}
        else:
            ended = self.open & {(event.rid, event.index)}
        if ended and not self._disconnected:
            if event.error is not None or event.finish_reason is not None:
                self.open -= ended
            self._events.append(event)
            self.num_unread += 1 + sum(len(entry.top) for entry in event.logprobs)
            self._is_changed.set()

    def disconnect(self) -> None:
        self._disconnected = True
        self._events.clear()
        self.num_unread = 0
        self._is_changed.set()


class EngineHealth:
    def __init__(self) -> None:
        self.heartbeat = 0.0  # time of the last heartbeat
        self.refusal: ErrorInfo | None = None  # error of new requests while the server stops

    @property
    def state(self) -> Literal["ok", "starting", "stalled", "stopping"]:
        if self.refusal is not None:
            return "stopping"
        if not self.heartbeat:
            return "starting"
        return "ok" if time.monotonic() - self.heartbeat < HEARTBEAT_STALE_S else "stalled"

    def check(self) -> None:
        if self.refusal is not None:
            raise RequestError.of(self.refusal)
        if self.state == "starting":
            raise overloaded("The engine is still starting.", retry_after=5)
        if self.state == "stalled":
            raise RequestError(503, "The engine makes no progress.", code="stalled", retry_after=5)


class RequestRegistry:
    """Requests in the engine. A stream of `submit` must be passed to `close`. A body named in a Submit or in `abandon` belongs to the
    processor until `released_bodies` names it."""

    def __init__(self, outbox: Outbox[ToProcessor], arena: Arena, max_requests: int):
        self._max_requests = max_requests
        self.stats = EngineStats()
        self._num_readers: Counter[int] = Counter()  # requests for which the processor owns a body, by its offset
        self._outbox, self._arena = outbox, arena
        self._rids = itertools.count(1)
        self._streams: dict[int, Stream] = {}  # streams with unfinished answers
        self.replies: set[Stream] = set()  # streams whose responses are being written
        self.health = EngineHealth()
        self.weight_version = ""  # empty: answers have none

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def new_rid(self) -> int:
        return next(self._rids)

    def announce(self, rid: int, payload: Region) -> None:
        """Announce an image of a future request. The body must then be passed on by `submit` or `abandon`."""
        self._outbox.send(Payload(rid, payload))

    def abandon(self, rid: int, body: int) -> None:
        self._outbox.send(Abort(rid, body))
        self._num_readers[body] += 1

    def submit(self, messages: list[Submit]) -> Stream:
        """Send one client's requests. RequestError as in `check_open` and `check_prompts_bytes`, or 400; the caller then still owns the
        body."""
        self.check_open()
        encoded, num_bytes = [], 0
        for message in messages:
            try:
                encoded.append(msgspec.msgpack.encode(message))
            except OverflowError:
                raise RequestError(400, "An integer of this request does not fit in 64 bits.", code="invalid_value") from None
            num_bytes += len(encoded[-1])
            check_prompts_bytes(num_bytes if len(messages) > 1 else 0)
        stream = Stream([(message.rid, index) for message in messages for index in range(message.n)])
        self.replies.add(stream)
        for message, data in zip(messages, encoded, strict=True):
            self._outbox.send_bytes(data)
            if message.body is not None:
                self._num_readers[message.body] += 1
            self._streams[message.rid] = stream
        return stream

    def send(self, message: ToProcessor) -> None:
        self._outbox.send(message)

    def check_open(self) -> None:
        """Raise RequestError 503 as in `EngineHealth.check`, or if the request limit is reached."""
        self.health.check()
        if len(self._streams) >= self._max_requests:
            raise overloaded("The server's request queue is full.")

    def close(self, stream: Stream) -> None:
        self.replies.discard(stream)
        self._free(stream)
        for rid in {rid for rid, _ in stream.open}:
            self._outbox.send(Abort(rid))

    def dispatch(self, message: Events) -> None:
        for event in message.events:
            stream = self._streams.get(event.rid)
            if stream is not None:
                stream.push(event)
                if not stream.open:
                    self._free(stream)  # even if the client does not read
        for offset in message.released_bodies:
            self._num_readers[offset] -= 1
            if not self._num_readers[offset]:
                del self._num_readers[offset]
                self._arena.free(offset)
        if message.stats is not None:
            self.stats = message.stats
            self._drop_unread()
        self.health.heartbeat = max(self.health.heartbeat, message.heartbeat)

    def _free(self, stream: Stream) -> None:
        for rid in {rid for rid, _ in stream.choices}:
            self._streams.pop(rid, None)

    def _drop_unread(self) -> None:
        if sum(stream.num_unread for stream in self.replies) > MAX_UNREAD_EVENTS:
            max(self.replies, key=lambda stream: stream.num_unread).disconnect()

    def refuse_new(self, error: ErrorInfo) -> None:
        self.health.refusal = error

    def refuse_all(self, error: ErrorInfo) -> None:
        self.refuse_new(error)
        for rid, stream in self._streams.items():
            stream.push(Event(rid, error=error))
