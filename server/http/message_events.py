"""The bytes of an answer in Anthropic's dialect: events of a stream, or one JSON document. Used by `reply.py`.

    message_start ──▶ content_block_start ──▶ content_block_delta … ──▶ content_block_stop ──▶ … ──▶ message_delta ──▶ message_stop

A block is open at a time: thoughts, text or one call.
"""

import secrets
from typing import Any

import msgspec
from pydantic_core import from_json

from engine.messages import ErrorInfo, Event
from server.http.sse import Choice, Format, Usage

MESSAGES_PATH = "/v1/messages"
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_encode = msgspec.json.Encoder().encode


class MessageFormat(Format):
    """One choice: the dialect has no others."""

    def __init__(self, created: int, model: str, include_usage: bool, continuous_usage: bool):
        self._head = {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "role": "assistant", "model": model}
        self._num_blocks = 0  # begun
        self._open: str | None = None  # type of the block that deltas go to

    def first_chunk(self, choice: Choice) -> bytes:
        usage = usage_json(choice.usage)
        return _event("message_start", message={**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage})

    def token_chunk(self, choice: Choice, event: Event) -> bytes:
        """Text that is held back is no event."""
        pieces = []
        if event.text:
            kind = "thinking" if event.is_reasoning else "text"
            if self._open != kind:
                pieces.append(self._begin(_thoughts("") if event.is_reasoning else _text("")))
            pieces.append(self._delta({"type": f"{kind}_delta", kind: event.text}))
        for call in event.calls:
            if call.name is not None:
                pieces.append(self._begin(_call(choice.calls[call.index].id, call.name, {})))
            if call.arguments:
                pieces.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return b"".join(pieces)

    def finish_chunk(self, choice: Choice, timings: dict[str, object]) -> bytes:
        return self._stop_block() + _event("message_delta", delta=_ending(choice), usage=usage_json(choice.usage), **timings)

    def end(self, usage: Usage, timings: dict[str, object]) -> bytes:
        return _event("message_stop")

    def document(self, choices: list[Choice], usage: Usage, timings: dict[str, object]) -> bytes:
        """Arguments that were cut are what can be read of them, as the SDK reads them from a stream."""
        choice = choices[0]
        thoughts, text = "".join(choice.reasoning), "".join(choice.content)
        blocks = [_thoughts(thoughts)] if thoughts else []
        blocks += [_text(text)] if text else []
        blocks += [_call(call.id, call.name, _read_arguments("".join(call.arguments))) for call in choice.calls]
        return _encode({**self._head, "content": blocks, **_ending(choice), "usage": usage_json(usage), **timings})

    def error_chunk(self, info: ErrorInfo) -> bytes:
        return b"event: error\ndata: " + message_error_body(info) + b"\n\n"

    def _begin(self, block: dict[str, object]) -> bytes:
        before = self._stop_block()
        self._open = str(block["type"])
        self._num_blocks += 1
        return before + _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, object]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _stop_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._num_blocks - 1)


def message_error_body(info: ErrorInfo) -> bytes:
    """Anthropic's error object: a response body, or the data of an event."""
    kind = ERROR_TYPES.get(info.status, "invalid_request_error" if info.status < 500 else "api_error")
    return _encode({"type": "error", "error": {"type": kind, "message": info.message}})


def usage_json(usage: Usage) -> dict[str, object]:
    """Cached tokens are not among the `input_tokens`."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_generated,
    }


def _ending(choice: Choice) -> dict[str, object]:
    reason = STOP_REASONS[choice.finish_reason or "stop"]
    if reason == "end_turn" and isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": reason, "stop_sequence": None}


def _text(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def _thoughts(text: str) -> dict[str, object]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _call(call_id: str, name: str, arguments: object) -> dict[str, object]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _read_arguments(text: str) -> dict[str, Any]:
    try:
        value = from_json(text, allow_partial=True, cache_strings="keys")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(event_name: str, **fields: object) -> bytes:
    return b"event: " + event_name.encode() + b"\ndata: " + _encode({"type": event_name, **fields}) + b"\n\n"
