"""The bytes of an answer in the dialect of `/v1/responses`: numbered events, or one JSON document.

response.created ──▶ output_item.added ──▶ … delta … ──▶ … done ──▶ output_item.done ──▶ … ──▶ response.completed or .incomplete
"""

import secrets
import time
from typing import Any

from engine.messages import ErrorInfo
from server.api.chat.tools import CustomText, custom_text
from server.api.responses.schema import joined
from server.http.sse import BlockFormat, Call, Choice, ReplyOptions, Usage, encode, named_event

ITEMS: dict[str, tuple[str, dict[str, object]]] = {  # of each kind: how its ids begin, and what there is of it before its text
    "thinking": ("rs", {"type": "reasoning", "status": "in_progress", "summary": [], "content": []}),
    "text": ("msg", {"type": "message", "role": "assistant", "status": "in_progress", "content": []}),
    "call": ("fc", {"type": "function_call", "status": "in_progress"}),
    "custom": ("ctc", {"type": "custom_tool_call", "status": "in_progress"}),
}
DELTAS = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments", "custom": "custom_tool_call_input"}
ARGUMENTS = {"call": "arguments", "custom": "input"}  # what a call has instead of content


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
        self._items.append(self._item(kind, call))
        added = self._event("output_item.added", output_index=len(self._items) - 1, item=self._items[-1])
        return before + added + self._part_event("added", kind, "")

    def kind_of(self, call: Call) -> str:
        return "custom" if call.name in self._custom_tools else "call"

    def delta(self, piece: str) -> bytes:
        if self._open == "custom" and not (piece := self._text.push(piece)):
            return b""
        self._pieces.append(piece)
        return self._event(f"{DELTAS[self._open]}.delta", **self._place(self._open), delta=piece)

    def finish_chunk(self, choice: Choice, timings: dict[str, object]) -> bytes:
        ending = self._ending(choice, choice.usage)
        last_item = self._stop_item(_last_status(self._items, choice, ending))
        return last_item + self._event(ending["status"], response={**self._head, **ending, "output": self._items, **timings})

    def end(self, usage: Usage, timings: dict[str, object]) -> bytes:
        return b""

    def document(self, choices: list[Choice], usage: Usage, timings: dict[str, object]) -> bytes:
        choice = choices[0]
        ending = self._ending(choice, usage)
        items = []
        for kind, text, call in choice.blocks():
            if call is not None and self.kind_of(call) == "custom":
                kind, text = "custom", custom_text(text)
            items.append(self._item(kind, call) | _said(kind, text) | {"status": "completed"})
        if items:
            items[-1]["status"] = _last_status(items, choice, ending)
        return encode({**self._head, **ending, "output": items, **timings})

    def error_chunk(self, info: ErrorInfo) -> bytes:
        error = self._event("error", code=info.code or info.type, message=info.message, param=info.param)
        failure = {"status": "failed", "error": {"code": "server_error", "message": info.message}, "output": self._items}
        return error + self._event("failed", response={**self._head, **failure})

    @staticmethod
    def _ending(choice: Choice, usage: Usage) -> dict[str, Any]:
        is_cut = choice.finish_reason == "length"
        return {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "usage": usage_json(usage),
        }

    def _stop_item(self, status: str) -> bytes:
        if not self._open:
            return b""
        kind, text, item = self._open, "".join(self._pieces), self._items[-1]
        self._open = ""
        self._pieces.clear()
        named = {"name": item["name"]} if kind == "call" else {}
        said = named | {ARGUMENTS.get(kind, "text"): text}
        done = self._event(f"{DELTAS[kind]}.done", **self._place(kind), **said) + self._part_event("done", kind, text)
        self._items[-1] = item | _said(kind, text) | {"status": status}
        return done + self._event("output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _part_event(self, step: str, kind: str, text: str) -> bytes:
        return b"" if kind in ARGUMENTS else self._event(f"content_part.{step}", **self._place(kind), part=_part(kind, text))

    def _place(self, kind: str) -> dict[str, object]:
        place: dict[str, object] = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place | ({} if kind in ARGUMENTS else {"content_index": 0}) | ({"logprobs": []} if kind == "text" else {})

    def _item(self, kind: str, call: Call | None) -> dict[str, Any]:
        prefix, rest = ITEMS[kind]
        item = {"id": f"{prefix}_{secrets.token_hex(16)}", **rest}
        if call is None:
            return item
        return {**item, "call_id": call.id, **self._namespaces.get(call.name, {"name": call.name}), ARGUMENTS[kind]: ""}

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
    """By the name that the model knows: the client's two."""
    spaces = [tool for tool in tools if tool["type"] == "namespace"]
    return {joined(tool["name"], one["name"]): {"namespace": tool["name"], "name": one["name"]} for tool in spaces for one in tool["tools"]}


def _said(kind: str, text: str) -> dict[str, object]:
    return {ARGUMENTS[kind]: text} if kind in ARGUMENTS else {"content": [_part(kind, text)]}


def _part(kind: str, text: str) -> dict[str, object]:
    extra: dict[str, object] = {"annotations": [], "logprobs": []} if kind == "text" else {}
    return {"type": DELTAS[kind], "text": text, **extra}


def _last_status(items: list[dict[str, Any]], choice: Choice, ending: dict[str, Any]) -> str:
    """Of the last item: a call that a stop string cut is incomplete, although the response is complete."""
    is_cut = bool(items) and items[-1]["type"] in ("function_call", "custom_tool_call") and not choice.calls[-1].is_whole
    return "incomplete" if is_cut else str(ending["status"])
