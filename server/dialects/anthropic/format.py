"""The bytes of an answer in Anthropic's dialect: events of a stream, or one JSON document.

message_start ──▶ content_block_start ──▶ content_block_delta … ──▶ content_block_stop ──▶ … ──▶ message_delta ──▶ message_stop
"""

import secrets

from pydantic_core import from_json

from engine.wire.messages import ErrorInfo
from server.http.sse import BlockFormat, Call, Choice, ReplyOptions, Usage, encode, named_event

MESSAGES_PATH = "/v1/messages"
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageFormat(BlockFormat):
    """One choice: the dialect has no others."""

    def __init__(self, options: ReplyOptions):
        identity = {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "role": "assistant", "model": options.model}
        self._head: dict[str, object] = identity | ({"warnings": options.warnings} if options.warnings else {})
        self._index = -1  # of the last block

    def first_chunk(self, choice: Choice) -> bytes:
        begun: dict[str, object] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_json(choice.usage)}
        return named_event("message_start", message=self._head | begun)

    def begin(self, kind: str, call: Call | None) -> bytes:
        before = self._stop_block()
        self._index += 1
        return before + named_event("content_block_start", index=self._index, content_block=_block(kind, "", call))

    def delta(self, piece: str) -> bytes:
        kind, name = ("input_json_delta", "partial_json") if self._open == "call" else (f"{self._open}_delta", self._open)
        return named_event("content_block_delta", index=self._index, delta={"type": kind, name: piece})

    def finish_chunk(self, choice: Choice, timings: dict[str, object]) -> bytes:
        return self._stop_block() + named_event("message_delta", delta=_ending(choice), usage=usage_json(choice.usage), **timings)

    def end(self, usage: Usage, timings: dict[str, object]) -> bytes:
        return named_event("message_stop")

    def document(self, choices: list[Choice], usage: Usage, timings: dict[str, object]) -> bytes:
        blocks = [_block(*block) for block in choices[0].blocks()]
        return encode({**self._head, "content": blocks, **_ending(choices[0]), "usage": usage_json(usage), **timings})

    def error_chunk(self, info: ErrorInfo) -> bytes:
        return b"event: error\ndata: " + message_error_body(info) + b"\n\n"

    def _stop_block(self) -> bytes:
        return named_event("content_block_stop", index=self._index) if self._open else b""


def message_error_body(info: ErrorInfo) -> bytes:
    kind = ERROR_TYPES.get(info.status, "invalid_request_error" if info.status < 500 else "api_error")
    return encode({"type": "error", "error": {"type": kind, "message": info.message}})


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


def _block(kind: str, text: str, call: Call | None) -> dict[str, object]:
    if call is not None:
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": _read_arguments(text)}
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def _read_arguments(text: str) -> object:
    """Of cut arguments, what can be read, as the SDK does."""
    try:
        value = from_json(text, allow_partial=True, cache_strings="keys")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}
