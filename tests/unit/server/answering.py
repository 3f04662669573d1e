"""Dialects: the chat that a request becomes; an answer with thoughts, text and two calls, and what a format makes of events."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from engine.wire.messages import CallDelta, Event, Logprob
from server.api.http.scan import Scanner
from server.api.http.streaming import Choice
from server.api.schema.requests import ChatRequest
from server.api.schema.validate import check
from server.errors import RequestError


def chat_of(takes: Any, value: dict[str, Any]) -> dict[str, Any]:
    scanner = Scanner("nonce", 10)
    scanner.feed(json.dumps(value).encode())
    chat = check(takes, json.loads(scanner.json())).chat_body(scanner)
    check(ChatRequest, chat).check_together(1000)
    plain = json.loads(json.dumps(chat, default=lambda one: one.model_dump(exclude_none=True, by_alias=True)))
    return {name: item for name, item in plain.items() if item is not None}


def assert_refused(translated: Callable[..., object], bad: Iterable[tuple[dict[str, Any], str]]) -> None:
    for fields, words in bad:
        with pytest.raises(RequestError) as refused:
            translated(**fields)
        assert refused.value.info.status == 400 and refused.value.info.message.startswith(words), fields


def named_events(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for message in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, body = message.split("\n")
        found.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def events(reason: Any) -> list[Event]:
    return [
        Event(1, "hm", 1, True, num_prompt_tokens=9, num_cached_tokens=4, logprobs=2 * [Logprob(1, b"hm", -1.0, [])]),
        Event(1, "", 2, True),
        Event(1, "Well", 3, logprobs=[Logprob(2, b"Well", -0.5, [])]),
        Event(1, " then", 4, calls=[CallDelta(0, "", "weather")]), Event(1, "", 5, calls=[CallDelta(0, '{"a":'), CallDelta(0, "1}")]),
        Event(1, "", 6, finish_reason=reason, num_prompt_tokens=9, num_cached_tokens=4, calls=[CallDelta(1, '{"b": [2', "other")]),
    ]  # fmt: skip


def stream_of(shape: Any, events: list[Event]) -> bytes:
    choice = Choice(0)
    choice.usage.num_prompt, choice.usage.num_cached = events[0].num_prompt_tokens, events[0].num_cached_tokens
    data: bytes = shape.first_chunk(choice)
    for event in events:
        choice.note(event)
        data += shape.token_chunk(choice, event, {})
    return data + shape.end(choice.usage, {})


def document_of(shape: Any, events: list[Event]) -> bytes:
    choice = Choice(0)
    for event in events:
        choice.note(event)
        choice.note_text(event)
    document: bytes = shape.document([choice], choice.usage, {})
    return document
