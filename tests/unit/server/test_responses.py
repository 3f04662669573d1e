"""OpenAI's newer dialect: what a request becomes as a chat, and what an answer becomes as items and events."""

import base64
import json
from typing import Any

from engine.wire.messages import CallDelta, ErrorInfo, Event
from server.api.dialects.responses import ResponseFormat, ResponsesRequest
from server.api.http.streaming import ReplyOptions
from tests.unit.server.answering import assert_refused, chat_of, document_of, events, named_events, stream_of

TOOL: dict[str, Any] = {"type": "function", "name": "weather", "description": "of a city", "parameters": {"type": "object"}, "strict": True}
CALL: dict[str, Any] = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}


def translated(**fields: Any) -> dict[str, Any]:
    return chat_of(ResponsesRequest, {"model": "m", "input": "why?", **fields})


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **fields}


def said(words: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": words, "annotations": []}]}


def test_fields_of_a_request() -> None:
    """Red if a field that changes the answer gets lost on the way."""
    same = {"temperature": 0.5, "top_p": 0.9, "stream": True, "parallel_tool_calls": False, "seed": 7}
    options = {"max_output_tokens": 5, "reasoning": {"effort": "none", "summary": "auto"}}
    chat = translated(**same, **options, metadata={"a": "b"}, instructions="be short")
    assert chat == {
        **same, "model": "m", "max_tokens": 5, "reasoning": {"effort": "none"},
        "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "why?"}],
    }  # fmt: skip
    schema = {"type": "object"}
    told = translated(text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}})
    assert told["response_format"] == {"type": "json_schema", "schema": schema}
    assert translated(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}


def test_images_by_reference_by_text_and_by_url() -> None:
    """Red if a large image does not stay in the body, or if what bounds it gets lost."""
    large = "data:image/png;base64," + base64.b64encode(bytes(1000)).decode()
    parts = [image(large, detail="low"), image("https://example.org/a.png", detail="original", max_pixels=5000)]
    shown = translated(input=[user(*parts)])["messages"][0]["content"]
    assert [part["image_url"]["url"] for part in shown] == ["nonce:0", "https://example.org/a.png"]
    assert [part["detail"] for part in shown] == ["low", "original"] and shown[1]["max_pixels"] == 5000


def test_a_history_with_thoughts_and_calls() -> None:
    thoughts = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    other = {**CALL, "call_id": "c2"}
    results = [
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "see"}, image("data:,AAAA")]},
    ]
    asked = user({"type": "input_text", "text": "so?"})
    items = [asked, thoughts, said("I look."), CALL, other, *results, said("It rains."), said("Much.")]
    chat = translated(input=items, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    calls = [{"id": id, "type": "function", "function": {"name": "weather", "arguments": CALL["arguments"]}} for id in ("c1", "c2")]
    question, turn, first, second, *last = chat["messages"]
    assert question == asked
    assert turn == {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": calls}
    assert first == {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    assert second["tool_call_id"] == "c2" and [part["type"] for part in second["content"]] == ["input_text", "input_image"]
    assert last == [{"role": "assistant", "content": "It rains."}, {"role": "assistant", "content": "Much."}]
    function = {name: value for name, value in TOOL.items() if name != "type"}
    assert chat["tools"] == [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "weather"}}
    assert chat["tool_choice"] == named


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input: "),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: "),
    ({"input": [user({"type": "input_file"})]}, "input[0].content[0]: "),
    ({"input": [{"role": "assistant", "content": [image("data:,")]}]}, "input[0].content: a message of role 'assistant' has no images"),
    ({"previous_response_id": "resp_1"}, "previous_response_id: "),
    ({"background": True}, "background: "), ({"n": 2}, "n: "),
    ({"tools": [{"type": "web_search", "name": "x"}], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice: needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice: names a function"),
    ({"reasoning": {"effort": "ultra"}}, "reasoning.effort: "),
]  # fmt: skip


def test_bad_requests_name_the_field_of_the_dialect() -> None:
    assert_refused(translated, BAD)


EVENTS = events("length")
USAGE = {
    "input_tokens": 9, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0}, "output_tokens": 6,
    "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 15,
}  # fmt: skip


def read(stream: bytes) -> list[dict[str, Any]]:
    """Events, which are numbered."""
    found = named_events(stream)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(events: list[Event]) -> list[dict[str, Any]]:
    return read(stream_of(ResponseFormat(OPTIONS, REPEATED, []), events))


OPTIONS = ReplyOptions("m", 0)
REPEATED = {"instructions": "be short"}


def document(events: list[Event]) -> dict[str, Any]:
    return dict(json.loads(document_of(ResponseFormat(OPTIONS, REPEATED, []), events)))


def test_events_of_a_stream() -> None:
    found = streamed(EVENTS)
    kinds = [(event["type"].removeprefix("response."), event.get("output_index")) for event in found]
    text = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    expected = [("created", None), ("in_progress", None)]
    expected += [(name, 0) for name in [*text[0], "reasoning_text.delta", "reasoning_text.done", *text[1]]]
    expected += [(name, 1) for name in [*text[0], "output_text.delta", "output_text.delta", "output_text.done", *text[1]]]
    expected += [(name, 2) for name in [call[0], call[1], *call[1:]]] + [(name, 3) for name in call]
    assert kinds == [*expected, ("incomplete", None)]
    last = found[-1]["response"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert last["output"] == done and last["usage"] == USAGE and last["incomplete_details"] == {"reason": "max_output_tokens"}
    first = found[0]["response"]
    assert first["id"] == last["id"] and first["status"] == "in_progress" and last["instructions"] == "be short"
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "function_call"]
    assert done[2]["arguments"] == '{"a":1}' and [item["status"] for item in done] == ["completed"] * 3 + ["incomplete"]
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == done[1]["content"][0]["text"] == "Well then"
    assert {event["item_id"] for event in deltas} == {done[1]["id"]}
    whole = document(EVENTS)
    for answer in (whole, last):
        answer["output"] = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in answer["output"]]
        del answer["id"]
    assert whole == last


def test_an_error_after_the_headers() -> None:
    error, failed = read(ResponseFormat(OPTIONS, REPEATED, []).error_chunk(ErrorInfo(503, "no", code="aborted")))
    assert (error["type"], error["code"], error["message"]) == ("error", "aborted", "no")
    assert failed["response"]["status"] == "failed" and failed["response"]["error"] == {"code": "server_error", "message": "no"}


def test_a_call_that_a_stop_string_cuts_is_not_made() -> None:
    for arguments, status in (('{"a":1}', "completed"), ('{"a":', "incomplete")):
        events = [Event(1, calls=[CallDelta(0, arguments, "f")]), Event(1, finish_reason="stop", stop_reason="x")]
        for response in (streamed(events)[-1]["response"], document(events)):
            assert (response["status"], response["output"][0]["status"]) == ("completed", status)
