"""Tool calls in a text that comes in pieces: what is said goes on as text, what is called becomes deltas.

    text ── <tool_call> ──▶ { ──▶ JSON: {"name": ..., "arguments": {...}}               (Hermes; Qwen3-VL)
      ▲                     └──▶ XML: <function=name><parameter=x>...</parameter>...    (the coder models)
      └──── </tool_call> ───────────────┘

Text decides, not ids: tokenizers differ in what is a token. Only what may begin a marker is held back, and white space before it. A marker
within a string of the JSON is part of it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.messages import CallDelta
from server.processor.detokenize import possible_start

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"<function=([^>\n]*)>")
PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
ESCAPE_OR_MARK = re.compile(r'\\.|(["{}\[\]\n])', re.DOTALL)
NAME = re.compile(r'"name"\s*:\s*("(?:\\.|[^"\\])*")', re.DOTALL)
ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*$')
STRING_OF_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*("(?:\\.|[^"\\])*")', re.DOTALL)
XML_MARK, XML_END = "<function=", "</function>"

Schemas = Mapping[str, Mapping[str, Any]]  # by function: types of its parameters by name


class JsonBody:
    """`{"name": ..., "arguments": {...}}`, whose arguments are passed on as they are written."""

    def __init__(self) -> None:
        self._top = ""  # of the object, without the objects and arrays in it
        self._name: str | None = None
        self._arguments: str | None = None  # read and not passed on; None: they have not begun
        self._is_argument = False  # what comes is part of them
        self._depth = 0
        self._in_string = False
        self._is_broken = False  # a line break stands in a string, which no JSON has: where strings end is not known
        self._is_whole = False
        self._held = ""  # a backslash, before what it escapes

    def push(self, text: str) -> tuple[str | None, str]:
        """The function's name, when it becomes known, and the next piece of its arguments' JSON; empty until the name is known."""
        before, text, start, end = self._name, self._held + text, 0, 0
        for mark in ESCAPE_OR_MARK.finditer(text):
            end = mark.end()
            if mark[1] is None or self._is_whole:
                continue
            if self._in_string or mark[1] in '"\n':
                self._quote(mark[1])
            else:
                border = mark.start() if mark[1] in "{[" else end
                self._keep(text[start:border])
                self._bracket(mark[1])
                start = border
        self._held = "\\" if end < len(text) and text.endswith("\\") else ""
        self._keep(text[start : len(text) - len(self._held)])
        if self._name is None and '"' in text and (found := NAME.search(self._top)):
            self._name = _text_of(found[1])
        if self._name is None or self._arguments is None:
            return None if before else self._name, ""
        piece, self._arguments = self._arguments, ""
        return None if before else self._name, piece

    def is_in_string(self) -> bool:
        """Whether a marker here would be part of a string."""
        return self._in_string and self._depth > 0 and not self._is_broken

    def _quote(self, char: str) -> None:
        self._is_broken |= self._in_string and char == "\n"
        self._in_string ^= char == '"'

    def _bracket(self, char: str) -> None:
        self._depth += 1 if char in "{[" else -1
        if char == "{" and self._depth == 2 and self._arguments is None and ARGUMENTS.search(self._top):
            self._is_argument, self._arguments = True, ""
        elif self._depth == 1:
            self._is_argument = False
        elif self._depth == 0:
            self._is_whole = True
            if self._arguments is None:
                found = STRING_OF_ARGUMENTS.search(self._top)
                self._arguments = (found and _text_of(found[1])) or "{}"

    def _keep(self, text: str) -> None:
        if self._is_argument:
            self._arguments = (self._arguments or "") + text
        elif self._depth < 2:
            self._top += text


def _text_of(literal: str) -> str | None:
    try:
        return str(json.loads(literal))
    except ValueError:
        return None


class XmlBody:
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

    def close(self, is_cut: bool) -> str:
        """The rest of the JSON at the end. `is_cut`: the text ends where a stop string was."""
        if self._name is None or (is_cut and not self._text.lstrip().startswith(XML_END)):
            return ""
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
        self._shown = ""  # decided, and not returned
        self._deltas: list[CallDelta] = []  # the same
        self._body: JsonBody | XmlBody | None = None
        self.is_inside = False  # a call has begun and not ended
        self._raw = ""  # of the call so far, in case it is none
        self._is_behind_call = False  # white space is not shown
        self._has_name = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta], bool]:
        """Text to show, pieces of calls, and whether the answer ends here."""
        self._held += text
        goes_on, is_done = True, False
        while self._held and goes_on and not is_done:
            goes_on = self._read_call() if self.is_inside else self._read_text()
            is_done = self._is_single and self.num_calls > 0 and not self.is_inside
        if is_done:
            self._held = ""
        return *self._take(), is_done

    def flush(self, is_cut: bool = False) -> tuple[str, list[CallDelta]]:
        """At the end, or where a stop string cuts."""
        held, self._held = self._held, ""
        if not self.is_inside:
            self._shown += held
        else:
            if held.startswith(CLOSE):
                self._raw += held
            else:
                self._feed(held)
            self._end_call(is_cut)
        return self._take()

    def _take(self) -> tuple[str, list[CallDelta]]:
        taken = self._shown, self._deltas
        self._shown, self._deltas = "", []
        return taken

    def _read_text(self) -> bool:
        """Up to the next call. False: what is held must wait."""
        held = self._held.lstrip() if self._is_behind_call else self._held
        said, begins, behind = held.partition(OPEN)
        if begins:
            self._shown, self._held = self._shown + said.rstrip(), behind
            self.is_inside, self._has_name, self._body, self._raw = True, False, None, OPEN
        else:
            end = len(held[: possible_start(held, OPEN)].rstrip())
            self._shown, self._held = self._shown + held[:end], held[end:]
        self._is_behind_call = self._is_behind_call and not held
        return bool(begins)

    def _read_call(self) -> bool:
        """Up to its end, or what looks like it. False: what is held must wait."""
        found = self._held.find(CLOSE)
        end = found if found >= 0 else possible_start(self._held, CLOSE)
        self._feed(self._held[:end])
        self._held = self._held[end:]
        if found < 0:
            return False
        behind = self._held[len(CLOSE) :]
        if isinstance(self._body, JsonBody) and self._body.is_in_string():
            if not behind.strip(" "):
                return False  # no string goes on behind a line break, or the text's end
            if not behind.lstrip(" ").startswith("\n"):
                self._held = behind
                self._feed(CLOSE)
                return True
        self._held = behind
        self._raw += CLOSE
        self._end_call()
        return True

    def _feed(self, text: str) -> None:
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
        if name is not None or arguments:
            self._deltas.append(CallDelta(self.num_calls, arguments, name))

    def _end_call(self, is_cut: bool = False) -> None:
        """A call that never said its name is text."""
        rest = self._body.close(is_cut) if isinstance(self._body, XmlBody) else ""
        self.is_inside = False
        if self._has_name:
            if rest:
                self._deltas.append(CallDelta(self.num_calls, rest))
            self.num_calls += 1
            self._is_behind_call = True
        else:
            self._shown += self._raw
