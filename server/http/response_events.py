"""The bytes of an answer in the dialect of `/v1/responses`: events of a stream, or one JSON document. Used by `server/api/responses.py`.

    response.created ──▶ output_item.added ──▶ … delta … ──▶ … done ──▶ output_item.done ──▶ … ──▶ response.completed or .incomplete

An item is open at a time: thoughts, a message or one call. Events are numbered.
"""

import secrets
import time
from typing import Any

import msgspec

from engine.messages import ErrorInfo, Event
from server.http.sse import Call, Choice, Format, Usage

TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
INCOMPLETE = {"length": "max_output_tokens"}
_encode = msgspec.json.Encoder().encode


class ResponseFormat(Format):
    """One choice: the dialect has no others. `echo` is what the answer repeats of its request."""

    def __init__(self, created: int, model: str, include_usage: bool, continuous_usage: bool, echo: dict[str, object]):
        identity = {"id": f"resp_{secrets.token_hex(16)}", "object": "response", "created_at": created, "model": model}
        never = {"background": False, "previous_response_id": None, "store": False, "truncation": "disabled"}
        self._head = {**identity, **never, **echo, "error": None, "incomplete_details": None, "usage": None}
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # begun; the last one may be open
        self._is_open = False
        self._pieces: list[str] = []  # of the open item

    def first_chunk(self, choice: Choice) -> bytes:
        response = {**self._head, "status": "in_progress", "output": []}
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def token_chunk(self, choice: Choice, event: Event) -> bytes:
        """Text that is held back is no event."""
        chunks = []
        if event.text:
            kind = "reasoning" if event.is_reasoning else "message"
            if not (self._is_open and self._items[-1]["type"] == kind):
                chunks += [self._begin(_thoughts() if event.is_reasoning else _message()), self._part_event("added", "")]
            chunks.append(self._delta(f"{TEXT_EVENTS[kind]}.delta", event.text))
        for call in event.calls:
            if call.name is not None:
                chunks.append(self._begin(_call(choice.calls[call.index])))
            if call.arguments:
                chunks.append(self._delta("response.function_call_arguments.delta", call.arguments))
        return b"".join(chunks)

    def finish_chunk(self, choice: Choice, timings: dict[str, object]) -> bytes:
        ending = self._ending(choice.finish_reason, choice.usage)
        last_item = self._stop_item(_last_status(self._items, choice, ending))
        response = {**self._head, **ending, "output": self._items, **timings}
        return last_item + self._event(f"response.{ending['status']}", response=response)

    def end(self, usage: Usage, timings: dict[str, object]) -> bytes:
        return b""

    def document(self, choices: list[Choice], usage: Usage, timings: dict[str, object]) -> bytes:
        choice = choices[0]
        ending = self._ending(choice.finish_reason, usage)
        thoughts, text = "".join(choice.reasoning), "".join(choice.content)
        items = [_filled(_thoughts(), thoughts, "completed")] if thoughts else []
        items += [_filled(_message(), text, "completed")] if text else []
        items += [_filled(_call(call), "".join(call.arguments), "completed") for call in choice.calls]
        if items:
            items[-1]["status"] = _last_status(items, choice, ending)
        return _encode({**self._head, **ending, "output": items, **timings})

    def error_chunk(self, info: ErrorInfo) -> bytes:
        error = self._event("error", code=info.code or info.type, message=info.message, param=info.param)
        failure = {"status": "failed", "error": {"code": "server_error", "message": info.message}, "output": self._items}
        return error + self._event("response.failed", response={**self._head, **failure})

    @staticmethod
    def _ending(reason: str | None, usage: Usage) -> dict[str, object]:
        cause = INCOMPLETE.get(reason or "")
        return {
            "status": "incomplete" if cause else "completed",
            "incomplete_details": {"reason": cause} if cause else None,
            "completed_at": None if cause else int(time.time()),
            "usage": usage_json(usage),
        }

    def _begin(self, item: dict[str, Any]) -> bytes:
        before = self._stop_item("completed")
        self._items.append(item)
        self._is_open = True
        return before + self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _delta(self, name: str, piece: str) -> bytes:
        self._pieces.append(piece)
        return self._event(name, **self._place(), delta=piece)

    def _stop_item(self, status: str) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        text, item = "".join(self._pieces), self._items[-1]
        self._pieces.clear()
        if item["type"] == "function_call":
            done = self._event("response.function_call_arguments.done", **self._place(), name=item["name"], arguments=text)
        else:
            done = self._event(f"{TEXT_EVENTS[item['type']]}.done", **self._place(), text=text) + self._part_event("done", text)
        self._items[-1] = _filled(item, text, status)
        return done + self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _part_event(self, step: str, text: str) -> bytes:
        part = _part_of(self._items[-1]["type"], text)
        return self._event(f"response.content_part.{step}", **self._place(), part=part)

    def _place(self) -> dict[str, object]:
        """Where the open item, or its text, is."""
        item = self._items[-1]
        place: dict[str, object] = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if item["type"] != "function_call":
            place["content_index"] = 0
        return place | ({"logprobs": []} if item["type"] == "message" else {})

    def _event(self, event_name: str, **fields: object) -> bytes:
        self._num_events += 1
        data = _encode({"type": event_name, "sequence_number": self._num_events - 1, **fields})
        return b"event: " + event_name.encode() + b"\ndata: " + data + b"\n\n"


def usage_json(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "total_tokens": usage.num_prompt + usage.num_generated,
    }


def _part_of(kind: str, text: str) -> dict[str, object]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _filled(item: dict[str, Any], text: str, status: str) -> dict[str, Any]:
    """The item with all of its text, or of its arguments."""
    said = {"arguments": text} if item["type"] == "function_call" else {"content": [_part_of(item["type"], text)]}
    return {**item, **said, "status": status}


def _last_status(items: list[dict[str, Any]], choice: Choice, ending: dict[str, object]) -> str:
    """Of the last item: a call that is cut, by a stop string, is none that a client can make, although the response is complete."""
    is_cut = bool(items) and items[-1]["type"] == "function_call" and not choice.calls[-1].is_whole
    return "incomplete" if is_cut else str(ending["status"])


def _message() -> dict[str, Any]:
    return {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _thoughts() -> dict[str, Any]:
    return {"id": f"rs_{secrets.token_hex(16)}", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def _call(call: Call) -> dict[str, Any]:
    identity = {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", "status": "in_progress"}
    return {**identity, "call_id": call.id, "name": call.name, "arguments": ""}
