"""Tool calls in a text that comes in pieces: what is said goes on as text, what is called becomes deltas. Used by `reasoning.py`.

    text ── <tool_call> ──▶ { ──▶ JSON: {"name": ..., "arguments": {...}}               (Hermes; Qwen3-VL)
      ▲                     └──▶ XML: <function=name><parameter=x>...</parameter>...    (the coder models)
      └──── </tool_call> ───────────────┘

Text decides, not ids: tokenizers differ in what is a token. Held back is only what may be the beginning of a marker, and white space
before one. A marker within a string of the JSON is part of it.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from engine.messages import CallDelta
from server.processor.detokenize import possible_start

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"<function=([^>\n]*)>")
PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
XML_MARK, XML_END = "<function=", "</function>"

Schemas = Mapping[str, Mapping[str, Any]]  # by function: types of its parameters by name


class CallBody(ABC):
    """What stands between the markers, in one of the notations."""

    @abstractmethod
    def push(self, text: str) -> tuple[str | None, str]:
        """The function's name, when it becomes known, and the next piece of its arguments' JSON; empty until the name is known."""

    def is_in_string(self) -> bool:
        """Whether the text so far ends within a string of JSON, of which a marker would be a part."""
        return False

    @abstractmethod
    def close(self, is_cut: bool) -> str | None:
        """The rest of the arguments' JSON at the end; None if there was no whole call. `is_cut`: the text ends where a stop string was."""


class JsonBody(CallBody):
    """`{"name": ..., "arguments": {...}}`, whose arguments are passed on as they are written."""

    def __init__(self) -> None:
        self._text = ""
        self._read = 0  # characters of it that were looked at
        self._depth = 0
        self._start: int | None = None  # of the string or value at depth 1
        self._in_string = False
        self._is_escaped = False
        self._is_broken = False  # a line break stands in a string, which no JSON has: where strings end is not known
        self._key: str | None = None  # whose value comes
        self._name: str | None = None
        self._sent = 0  # characters of the arguments' value
        self._arguments: tuple[int, int] | None = None  # where the value is; its end grows
        self._is_whole = False

    def push(self, text: str) -> tuple[str | None, str]:
        before = self._name
        self._text += text
        while self._read < len(self._text) and not self._is_whole:
            self._step(self._text[self._read])
            self._read += 1
        if self._key == "arguments" and self._start is not None and self._text[self._start] == "{":
            self._arguments = (self._start, self._read)
        return (self._name if before is None else None), self._take()

    def is_in_string(self) -> bool:
        return self._in_string and self._depth > 0 and not self._is_broken

    def close(self, is_cut: bool) -> str | None:
        return self._take() if self._is_whole and self._name is not None else None

    def _take(self) -> str:
        """What the client has not got of the arguments."""
        if self._name is None or (self._arguments is None and (self._sent or not self._is_whole)):
            return ""
        if self._arguments is None:
            self._sent = len("{}")
            return "{}"
        start, end = self._arguments
        piece = self._text[start + self._sent : end]
        self._sent += len(piece)
        return piece

    def _step(self, char: str) -> None:
        if self._in_string:
            self._is_broken |= char == "\n"
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 1:
                    self._end_value(self._read + 1)
            return
        if char == '"':
            self._in_string = True
            self._begin()
        elif char in "{[":
            if self._depth == 1:
                self._begin()
            self._depth += 1
        elif char in "}]":
            if self._depth == 1:
                self._end_scalar()
                self._is_whole = True
            self._depth -= 1
            if self._depth == 1:
                self._end_value(self._read + 1)
        elif char == ",":
            self._end_scalar()
        elif self._depth == 1 and self._key is not None and not char.isspace() and char != ":":
            self._begin()

    def _begin(self) -> None:
        if self._depth == 1 and self._start is None:
            self._start = self._read

    def _end_scalar(self) -> None:
        if self._depth == 1 and self._start is not None:
            self._end_value(self._read)

    def _end_value(self, end: int) -> None:
        """A key or a value at depth 1 lies in `_start : end`."""
        if self._start is None:
            return
        start, self._start = self._start, None
        if self._key == "arguments" and self._text[start] == "{":  # as it is written, whatever that is
            self._key, self._arguments = None, (start, end)
            return
        try:
            value = json.loads(self._text[start:end])
        except ValueError:
            value = None
        key, self._key = self._key, None
        if key is None:
            self._key = str({"parameters": "arguments"}.get(value, value)) if isinstance(value, str) else "?"
        elif key == "name" and isinstance(value, str):
            self._name = value
        elif key == "arguments" and isinstance(value, str):  # JSON in a string
            self._text = self._text[: self._read + 1] + value + self._text[self._read + 1 :]
            self._arguments = (self._read + 1, self._read + 1 + len(value))
            self._read += len(value)


class XmlBody(CallBody):
    """`<function=name><parameter=x>value</parameter></function>`: a value is JSON if its schema does not say that it is a string."""

    def __init__(self, schemas: Schemas):
        self._schemas = schemas
        self._text = ""
        self._name: str | None = None
        self._num_sent = 0

    def push(self, text: str) -> tuple[str | None, str]:
        self._text += text
        found = None
        if self._name is None:
            match = FUNCTION.search(self._text)
            if match is None:
                return None, ""
            found = self._name = match[1].strip()
            self._text = self._text[match.end() :]
        pieces = []
        while match := PARAMETER.search(self._text):
            self._text = self._text[match.end() :]
            parameter = match[1].strip()
            opening = ", " if self._num_sent else "{"
            pieces.append(f"{opening}{json.dumps(parameter, ensure_ascii=False)}: {self._value(parameter, match[2])}")
            self._num_sent += 1
        return found, "".join(pieces)

    def close(self, is_cut: bool) -> str | None:
        if self._name is None or (is_cut and not self._text.lstrip().startswith(XML_END)):
            return None
        return "}" if self._num_sent else "{}"

    def _value(self, parameter: str, text: str) -> str:
        schema = self._schemas.get(self._name or "", {}).get(parameter)
        if not (isinstance(schema, dict) and schema.get("type") == "string"):
            try:
                return json.dumps(json.loads(text), ensure_ascii=False)
            except ValueError:
                pass
        return json.dumps(text, ensure_ascii=False)


class CallSplitter:
    """One answer's text. `is_single` ends it behind the first call."""

    def __init__(self, schemas: Schemas, is_single: bool):
        self._schemas = schemas
        self._is_single = is_single
        self._held = ""  # not decided
        self._body: CallBody | None = None
        self.is_inside = False  # a call has begun and not ended
        self._raw = ""  # of the call so far, in case it is none
        self._is_behind_call = False  # white space is not shown
        self._has_name = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta], bool]:
        """Text to show, pieces of calls, and whether the answer ends here."""
        self._held += text
        shown: list[str] = []
        deltas: list[CallDelta] = []
        while self._held:
            is_done = self._read_call(shown, deltas) if self.is_inside else self._read_text(shown)
            if self._is_single and self.num_calls and not self.is_inside:
                self._held = ""
                return "".join(shown), deltas, True
            if is_done:
                break
        return "".join(shown), deltas, False

    def flush(self, is_cut: bool = False) -> tuple[str, list[CallDelta]]:
        """At the end, or where a stop string cuts. A call without its closing marker counts if it is whole; one without a name is text."""
        shown: list[str] = []
        deltas: list[CallDelta] = []
        if self.is_inside:
            if self._held.startswith(CLOSE):
                self._raw += self._held
            else:
                self._feed(self._held, deltas)
            self._end_call(shown, deltas, is_cut)
        else:
            shown.append(self._held)
        self._held = ""
        return "".join(shown), deltas

    def _read_text(self, shown: list[str]) -> bool:
        """Up to the next call. Returns whether the rest must wait."""
        if self._is_behind_call:
            self._held = self._held.lstrip()
            self._is_behind_call = not self._held
        found = self._held.find(OPEN)
        if found >= 0:
            shown.append(self._held[:found].rstrip())
            self._held = self._held[found + len(OPEN) :]
            self.is_inside, self._has_name, self._body, self._raw = True, False, None, OPEN
            return False
        keep = possible_start(self._held, OPEN)
        keep = len(self._held[:keep].rstrip())
        shown.append(self._held[:keep])
        self._held = self._held[keep:]
        return True

    def _read_call(self, shown: list[str], deltas: list[CallDelta]) -> bool:
        found = self._held.find(CLOSE)
        end = found if found >= 0 else possible_start(self._held, CLOSE)
        self._feed(self._held[:end], deltas)
        self._held = self._held[end:]
        if found < 0:
            return True
        behind = self._held[len(CLOSE) :]
        if self._body is not None and self._body.is_in_string():
            if not behind.strip(" "):
                return True  # no string goes on behind a line break, or the text's end
            if not behind.lstrip(" ").startswith("\n"):
                self._held = behind
                self._feed(CLOSE, deltas)
                return False
        self._held = behind
        self._raw += CLOSE
        self._end_call(shown, deltas)
        return False

    def _feed(self, text: str, deltas: list[CallDelta]) -> None:
        self._raw += text
        if self._body is None:
            said = self._raw[len(OPEN) :].lstrip()
            if not said or XML_MARK.startswith(said):
                return
            self._body = XmlBody(self._schemas) if said.startswith(XML_MARK) else JsonBody()
            text = said
        name, arguments = self._body.push(text)
        if name is not None:
            self._has_name = True
            deltas.append(CallDelta(self.num_calls, arguments, name))
        elif arguments:
            deltas.append(CallDelta(self.num_calls, arguments))

    def _end_call(self, shown: list[str], deltas: list[CallDelta], is_cut: bool = False) -> None:
        """A call that never said its name is text."""
        rest = self._body.close(is_cut) if self._body is not None else None
        self.is_inside = False
        if self._has_name:
            if rest:
                deltas.append(CallDelta(self.num_calls, rest))
            self.num_calls += 1
            self._is_behind_call = True
        else:
            shown.append(self._raw)
