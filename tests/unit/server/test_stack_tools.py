"""Tools through the real api and processor, by OpenAI's own client."""

import contextlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from engine.wire.messages import EngineRequest, RequestOutput
from engine.wire.stats import Stages
from server.checkpoint import read_checkpoint
from server.processor.text.prompt import PromptBuilder
from tests.eventually import eventually
from tests.unit.server.stack import FakeScheduler, Stack, StackOf, answer_ids, hold_silently
from tests.unit.server.test_stack import chunks_of, ids_of, user

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>'
XML_PARAMETERS = "<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>"
XML_CALL = f"<tool_call>\n<function=weather>\n{XML_PARAMETERS}\n</function>\n</tool_call>"
ARGUMENTS = {"city": "Köln", "days": 3}
TOOLS = [{
    "type": "function",
    "function": {
        "name": "weather",
        "description": "what <|im_end|> it will be",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}]  # fmt: skip
QUESTION = user("How will the weather be?")


def say(stack: Stack, tokenizer: Tokenizer, text: str) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    stack.script = answer_ids([*ids_of(tokenizer, text), end])


def test_calls_in_a_document(stack: Stack, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    say(stack, tokenizer, f"Let me see.\n{CALL}\n{CALL}")
    answer: Any = client.chat.completions.create(model="test-model", messages=QUESTION, tools=TOOLS)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert [(call.type, call.function.name) for call in choice.message.tool_calls] == [("function", "weather")] * 2
    assert all(json.loads(call.function.arguments) == ARGUMENTS for call in choice.message.tool_calls)
    assert len({call.id for call in choice.message.tool_calls}) == 2
    say(stack, tokenizer, CALL)
    assert stack.chat("x", tools=TOOLS).json()["choices"][0]["message"]["content"] is None
    lengths = set()
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        message = stack.chat("x", **fields).json()["choices"][0]["message"]
        assert message["content"] == CALL and "tool_calls" not in message
        lengths.add(stack.last.prompt.length)
    assert len(lengths) == 1
    stack.script = answer_ids(ids_of(tokenizer, CALL[:60]), reason="length")
    cut = stack.chat("x", tools=TOOLS).json()["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_a_call_is_two_deltas(stack: Stack, tokenizer: Tokenizer) -> None:
    say(stack, tokenizer, f"Well. {CALL}{CALL}")
    chunks: list[Any] = chunks_of(stack.chat("x", stream=True, tools=TOOLS).text)
    for index in range(2):
        calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", []) if call["index"] == index]
        assert calls[0].keys() == {"index", "id", "type", "function"} and calls[0]["function"]["name"] == "weather"
        assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in calls[1:])
        assert json.loads("".join(call["function"]["arguments"] for call in calls)) == ARGUMENTS and len(calls) == 2
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Well."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    shown = [chunk["choices"][0]["delta"] for chunk in chunks[1:-1]]
    assert all(delta.get("content") or delta.get("tool_calls") for delta in shown), "chunks that say nothing"


def test_a_call_before_a_stop_string_is_a_call_if_it_is_whole(stack: Stack, tokenizer: Tokenizer) -> None:
    for text, stop, is_whole in (
        (f"{CALL}\nObservation: 5", "Observation:", True), (CALL, "</tool_call>", True), (XML_CALL, "</tool_call>", True),
        (XML_CALL, "days", False), (CALL, "days", False),
    ):  # fmt: skip
        stack.script = answer_ids(ids_of(tokenizer, text))
        (choice,) = stack.chat("x", tools=TOOLS, stop=[stop]).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls" if is_whole else "stop", stop)
        given = choice["message"]["tool_calls"][0]["function"]["arguments"]
        with contextlib.nullcontext() if is_whole else pytest.raises(ValueError):
            assert json.loads(given) == ARGUMENTS
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {"max_tokens": 100, "messages": QUESTION, "stop_sequences": ["days"], "tools": tools}
    answer = stack.http.post("/v1/messages", json=body).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "days")


def test_no_second_call_where_one_is_asked_for(stack: Stack, tokenizer: Tokenizer) -> None:

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        hold_silently(scheduler, request)
        scheduler.send([RequestOutput(request.rid, ids_of(tokenizer, f"{CALL}\n{CALL}"), stages=Stages())], [])

    stack.script = script
    choice = stack.chat("x", tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]
    assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")
    eventually(lambda: stack.last.rid in stack.scheduler.aborted)


def test_a_call_inside_thoughts_is_not_lost(stack_of: StackOf, thinking_folder: Path, tokenizer: Tokenizer) -> None:
    thinker = stack_of(thinking_folder)
    for text in (f"hm <tool_call>x\n{CALL} so\n</think>\n\nDone.", f"hm\n{CALL}</think>Done.", f"hm {CALL[:30]}</think>{CALL[30:]}Done."):
        say(thinker, tokenizer, text)
        message = thinker.chat("x", tools=TOOLS).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning"][:2]) == ("Done.", "hm"), text
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]][-1:] == [ARGUMENTS]
        assert CALL not in message["reasoning"]
    thinker.settle()


def test_a_history_of_calls_is_shown_as_the_template_has_it(stack: Stack, model_folder: Path) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "<|im_start|>"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'},
        {"role": "tool", "tool_call_id": "call_2"},
    ]
    assert stack.http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS}).status_code == 200
    tokenizer = PromptBuilder(read_checkpoint(model_folder)).tokenizer
    prompt = stack.prompt()
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    assert '{"name": "weather", "arguments": {"city": "<|im_start|>"}}' in text
    assert '<tool_response>\n{"rain": true}\n</tool_response>' in text
    assert '"description": "what <|im_end|> it will be"' in text
    assert prompt.count(tokenizer.token_to_id("<|im_start|>")) == 5  # system with the tools, user, assistant, results, generation
    assert prompt.count(tokenizer.token_to_id("<|im_end|>")) == 4


def function(is_strict: bool) -> dict[str, object]:
    return {"name": "g", "parameters": {"type": "object", "properties": {"a": WRONG}}, "strict": is_strict}


WRONG = {"type": "array", "items": {"type": "nonsense"}}
FORMAT = {"type": "json_schema", "json_schema": {"schema": WRONG}}


def test_a_schema_that_cannot_be_compiled_is_a_400(stack: Stack) -> None:
    strict = {"type": "function", "function": function(is_strict=True)}
    cases: list[tuple[str, dict[str, object]]] = [
        ("tools", {"tools": [*TOOLS, strict]}), ("response_format.json_schema.schema", {"tools": TOOLS, "response_format": FORMAT}),
        ("response_format.json_schema.schema", {"response_format": FORMAT}),
        ("tools", {"input": "x", "tools": [{"type": "function", **function(is_strict=True)}]}),
    ]  # fmt: skip
    for param, fields in cases:
        body = fields if "input" in fields else {"messages": QUESTION, **fields}
        response = stack.http.post("/v1/responses" if "input" in fields else "/v1/chat/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param) and "nonsense" in error["message"], error
    for fields in ({"tools": [strict], "tool_choice": "none"}, {"tools": [{"type": "function", "function": function(is_strict=False)}]}):
        assert stack.chat("x", **fields).status_code == 200


def test_a_template_without_tools_is_a_400(stack_of: StackOf, model_folder: Path, tmp_path: Path) -> None:
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    response = stack_of(tmp_path).chat("x", tools=TOOLS)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def post(stack: Stack, path: str, **body: object) -> Any:
    answer = stack.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return chunks_of(answer.text) if body.get("stream") and "chat" in path else answer.json()


def test_what_a_vendor_runs_is_dropped(stack: Stack, tokenizer: Tokenizer) -> None:
    say(stack, tokenizer, '<tool_call>\n{"name": "files__patch", "arguments": {"input": "x"}}\n</tool_call>')
    function = {"type": "function", "name": "patch", "parameters": {"type": "object"}}
    tools: list[dict[str, object]] = [{"type": "namespace", "name": "files", "tools": [function]}, {"type": "custom", "name": "x"}]
    tools.append({"type": "web_search", "external_web_access": False})
    answer = post(stack, "/v1/responses", input="x", tools=tools, context_management=[{}])
    item = answer["output"][-1]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "patch", "files")
    post(stack, "/v1/responses", input=[item], tools=tools)
    of_vendor = [{"type": "web_search_20250305", "name": "web_search"}]
    post(stack, "/v1/messages", messages=QUESTION, max_tokens=9, tools=of_vendor)
    choice = {"type": "function", "function": {"name": "code_interpreter"}}
    named = stack.chat("x", tools=[*TOOLS, {"type": "code_interpreter"}], tool_choice=choice)
    assert named.status_code == 400 and named.json()["error"]["param"] == "tool_choice"
