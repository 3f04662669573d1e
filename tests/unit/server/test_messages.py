"""Anthropic's dialect: what a request becomes as a chat, and what an answer becomes as blocks and events."""

import base64
import json
from typing import Any

from engine.wire.messages import ErrorInfo, Event
from server.api.dialects.anthropic import MessageFormat, MessagesRequest, message_error_body
from server.api.http.streaming import ReplyOptions
from tests.unit.server.answering import assert_refused, chat_of, document_of, events, named_events, stream_of

QUESTION: dict[str, Any] = {"role": "user", "content": "why?"}
TOOL: dict[str, Any] = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}


def translated(**fields: Any) -> dict[str, Any]:
    return chat_of(MessagesRequest, {"model": "m", "max_tokens": 5, "messages": [QUESTION], **fields})


def image(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_fields_of_a_request() -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stream": True}
    rest = {"metadata": {"user_id": "x"}, "thinking": {"type": "disabled"}, "seed": 7, "stop_sequences": ["x"]}
    assert translated(**asked, **rest, system=[text("be short")]) == {
        "model": "m", "max_tokens": 5, "stop": ["x"], "seed": 7, "metadata": {"user_id": "x"}, "enable_thinking": False, **asked,
        "messages": [{"role": "system", "content": [text("be short")]}, QUESTION],
    }  # fmt: skip
    assert translated(thinking={"type": "enabled", "budget_tokens": 1024})["enable_thinking"] is True
    schema = {"type": "object"}
    shape = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": shape}}, {"output_format": shape}):
        assert translated(**fields)["response_format"] == shape


def test_images_by_reference_by_text_and_by_url() -> None:
    large = base64.b64encode(bytes(1000)).decode()
    url = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    parts = translated(messages=[{"role": "user", "content": [image(large), image("AAAA"), url]}])["messages"][0]["content"]
    assert [part["image_url"]["url"] for part in parts] == ["nonce:0", "data:image/png;base64,AAAA", "https://example.org/a.png"]


def test_a_history_with_calls() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}, text("I look."), use]
    results = [{"type": "tool_result", "tool_use_id": "t1", "content": [text("see"), image("AAAA")]}, text("and?")]
    turns = [QUESTION, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    chat = translated(messages=turns, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert chat["messages"] == [
        QUESTION,
        {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": [text("see"), picture]},
        {"role": "user", "content": [text("and?")]},
    ]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("required", False)
    assert chat["tools"][0]["function"]["parameters"] == {"type": "object"}
    named = translated(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "weather"}} and named["parallel_tool_calls"]
    assert translated(messages=[QUESTION, {"role": "assistant", "content": [text("Be")]}])["continue_final_message"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "5"}, "max_tokens: "),
    (user([{"type": "document"}]), "messages[0].content[0]: "),
    ({"messages": [{"role": "assistant", "content": [image("AAAA")]}]}, "messages[0].content[0]: a message of role 'assistant' has"),
    (user([{"type": "image", "source": {"type": "file", "file_id": "x"}}]), "messages[0].content[0].source: "),
    (user(None), "messages[0].content: "),
    ({"tools": [{"type": "bash_20250124"}], "tool_choice": {"type": "tool", "name": "bash"}}, "tool_choice: needs tools"),
    ({"tools": [TOOL, {"type": "bash_20250124"}], "tool_choice": {"type": "tool", "name": "bash"}}, "tool_choice: names a function"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice: names a function"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"), ({"n": 2}, "n: "),
    ({"container": "x"}, "container: "),
]  # fmt: skip


def test_bad_requests_name_the_field_of_the_dialect() -> None:
    assert_refused(translated, BAD)


EVENTS = events("stop")
USAGE = {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 6}


def streamed(events: list[Event]) -> list[dict[str, Any]]:
    return named_events(stream_of(MessageFormat(ReplyOptions("m", 0)), events))


def test_events_of_a_stream() -> None:
    found = streamed(EVENTS)
    assert found[0]["message"]["usage"] == USAGE | {"output_tokens": 0}
    kinds = [(event["type"].removeprefix("content_block_"), event.get("index")) for event in found[1:-2]]
    assert kinds == [
        ("start", 0), ("delta", 0), ("stop", 0), ("start", 1), ("delta", 1), ("delta", 1), ("stop", 1),
        ("start", 2), ("delta", 2), ("delta", 2), ("stop", 2), ("start", 3), ("delta", 3), ("stop", 3),
    ]  # fmt: skip
    assert [event["content_block"]["type"] for event in found if "content_block" in event] == ["thinking", "text", "tool_use", "tool_use"]
    assert found[-2] == {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": USAGE}
    assert found[-1] == {"type": "message_stop"}


def test_a_document() -> None:
    answer = json.loads(document_of(MessageFormat(ReplyOptions("m", 0)), EVENTS))
    thoughts, said, first, second = answer["content"]
    assert thoughts == {"type": "thinking", "thinking": "hm", "signature": ""} and said == text("Well then")
    assert (first["name"], first["input"], second["name"], second["input"]) == ("weather", {"a": 1}, "other", {"b": [2]})
    assert first["id"] != second["id"] and answer["usage"] == USAGE and answer["stop_reason"] == "tool_use"


def test_why_it_ended() -> None:
    for reason, stopped_by, ending in (
        ("stop", None, ("end_turn", None)), ("length", None, ("max_tokens", None)),
        ("stop", "x", ("stop_sequence", "x")), ("stop", 7, ("end_turn", None)),
    ):  # fmt: skip
        event = Event(1, "a", 1, finish_reason=reason, stop_reason=stopped_by, num_prompt_tokens=1)
        delta = streamed([event])[-2]["delta"]
        assert (delta["stop_reason"], delta["stop_sequence"]) == ending
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 503: "overloaded_error", 500: "api_error"}
    for status, kind in kinds.items():
        info = ErrorInfo(status, "no")
        assert json.loads(message_error_body(info)) == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert MessageFormat(ReplyOptions("m", 0)).error_chunk(info).startswith(b'event: error\ndata: {"type":"error"')
