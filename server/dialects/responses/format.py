"""The bytes of an answer in the dialect of `/v1/responses`: numbered events, or one JSON document.

response.created ──▶ output_item.added ──▶ … delta … ──▶ … done ──▶ output_item.done ──▶ … ──▶ response.completed or .incomplete
"""

import secrets
import time
from typing import Any, NamedTuple

from engine.wire.messages import ErrorInfo
from server.dialects.responses.schema import joined
from server.http.sse import BlockFormat, Call, Choice, ReplyOptions, Usage, encode, named_event
from server.openai.tools import CustomText, custom_text


class Kind(NamedTuple):
    """What items of a kind begin with, and the name of their deltas. A call has a text of its own `field` instead of content."""

    prefix: str
    delta: str
    start: dict[str, object]
    field: str = ""


KINDS = {
    "thinking": Kind("rs", "reasoning_text", {"type": "reasoning", "summary": [], "content": []}),
    "text": Kind("msg", "output_text", {"type": "message", "role": "assistant", "content": []}),
    "call": Kind("fc", "function_call_arguments", {"type": "function_call"}, "arguments"),
    "custom": Kind("ctc", "custom_tool_call_input", {"type": "custom_tool_call"}, "input"),
}


class ResponseFormat(BlockFormat):
    """One choice: the dialect has no others."""

    def __init__(self, options: ReplyOptions):
        identity = {"id": f"resp_{secrets.token_hex(16)}", "object": "response", "created_at": options.created, "model": options.model}
        never = {"background": False, "truncation": "disabled", "store": False, "previous_response_id": None}
        self._head = {**identity, **never, **options.echo, "error": None, "incomplete_details": None, "usage": None}
        if options.warnings:
            self._head["warnings"] = options.warnings
        self._custom_tools = options.custom_tools
        self._namespaces = _namespaces(options.echo.get("tools", []))
        self._text = CustomText()
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # begun; the last one may be open
        self._pieces: list[str] = []  # of the open item

    def first_chunk(self, choice: Choice) -> bytes:
        response = {**self._head, "status": "in_progress", "output": []}
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def begin(self, kind: str, call: Call | None) -> bytes:
        before = self._stop_item("completed")
        self._text = CustomText()
        item = {"id": f"{KINDS[kind].prefix}_{secrets.token_hex(16)}", "status": "in_progress", **KINDS[kind].start}
        if call is not None:
            item |= {"call_id": call.id, **self._namespaces.get(call.name, {"name": call.name}), KINDS[kind].field: ""}
        self._items.append(item)
        return before + self._item_event("added") + self._part_event("added", kind, "")

    def kind_of(self, call: Call) -> str:
        return "custom" if call.name in self._custom_tools else "call"

    def delta(self, piece: str) -> bytes:
        if self._open == "custom" and not (piece := self._text.push(piece)):
            return b""
        self._pieces.append(piece)
        return self._event(f"{KINDS[self._open].delta}.delta", **self._place(self._open), delta=piece)

    def finish_chunk(self, choice: Choice, timings: dict[str, object]) -> bytes:
        last_item, response = self._finish(choice, choice.usage, timings)
        return last_item + self._event(response["status"], response=response)

    def end(self, usage: Usage, timings: dict[str, object]) -> bytes:
        return b""

    def document(self, choices: list[Choice], usage: Usage, timings: dict[str, object]) -> bytes:
        for kind, text, call in choices[0].blocks():
            self._begin(self.kind_of(call) if call else kind, call)
            self._pieces.append(custom_text(text) if self._open == "custom" else text)
        return encode(self._finish(choices[0], usage, timings)[1])

    def error_chunk(self, info: ErrorInfo) -> bytes:
        error = self._event("error", code=info.code or info.type, message=info.message, param=info.param)
        failure = {"status": "failed", "error": {"code": "server_error", "message": info.message}, "output": self._items}
        return error + self._event("failed", response={**self._head, **failure})

    def _finish(self, choice: Choice, usage: Usage, timings: dict[str, object]) -> tuple[bytes, dict[str, Any]]:
        """Return the events of the last item and the complete response. A call that a stop string cut is incomplete, although the response
        is complete."""
        is_cut = choice.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        is_half_call = self._open in ("call", "custom") and not choice.calls[-1].is_whole
        events = self._stop_item("incomplete" if is_half_call else status)
        ending = {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "usage": usage_json(usage),
        }
        return events, {**self._head, **ending, "output": self._items, **timings}

    def _stop_item(self, status: str) -> bytes:
        if not self._open:
            return b""
        kind, text, item = self._open, "".join(self._pieces), self._items[-1]
        self._open, field = "", KINDS[kind].field
        self._pieces.clear()
        named = {"name": item["name"]} if kind == "call" else {}
        done = self._event(f"{KINDS[kind].delta}.done", **self._place(kind), **named, **{field or "text": text})
        done += self._part_event("done", kind, text)
        item |= {"status": status, **({field: text} if field else {"content": [_part(kind, text)]})}
        return done + self._item_event("done")

    def _item_event(self, step: str) -> bytes:
        return self._event(f"output_item.{step}", output_index=len(self._items) - 1, item=self._items[-1])

    def _part_event(self, step: str, kind: str, text: str) -> bytes:
        return b"" if KINDS[kind].field else self._event(f"content_part.{step}", **self._place(kind), part=_part(kind, text))

    def _place(self, kind: str) -> dict[str, object]:
        place: dict[str, object] = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place | ({} if KINDS[kind].field else {"content_index": 0}) | ({"logprobs": []} if kind == "text" else {})

    def _event(self, name: str, /, **fields: object) -> bytes:
        self._num_events += 1
        return named_event(name if name == "error" else f"response.{name}", sequence_number=self._num_events - 1, **fields)


def usage_json(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning, **usage.draft_json()},
        "total_tokens": usage.num_prompt + usage.num_generated,
    }


def _namespaces(tools: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the client's two names of each function of a namespace, by the name that the model knows."""
    spaces = [tool for tool in tools if tool["type"] == "namespace"]
    return {joined(tool["name"], one["name"]): {"namespace": tool["name"], "name": one["name"]} for tool in spaces for one in tool["tools"]}


def _part(kind: str, text: str) -> dict[str, object]:
    extra: dict[str, object] = {"annotations": [], "logprobs": []} if kind == "text" else {}
    return {"type": KINDS[kind].delta, "text": text, **extra}
