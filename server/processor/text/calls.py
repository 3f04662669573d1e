"""Parser of tool calls in streamed text: text passes through, calls become deltas.

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

from engine.wire.messages import CallDelta
from server.processor.text.detokenize import possible_start

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ESCAPE_OR_MARK = re.compile(r'\\.|(["{}\[\]\n])', re.DOTALL)
WHITE_SPACE = re.compile(r"\s+")
NAME_BEGIN = re.compile(r'"name"\s*:\s*"')
STRING_REST = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)  # up to the closing quote
ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*$')
STRING_OF_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*("(?:\\.|[^"\\])*")', re.DOTALL)
WINDOW = 16  # characters of `"parameters" : `
MAX_SPACES = 64  # spaces after a marker in a string; with more, the string continues
XML_MARK, XML_END = "<function=", "</function>"
FUNCTION, PARAMETER, VALUE_END = re.compile(XML_MARK), re.compile("<parameter="), re.compile("</parameter>")
NAME_END = re.compile(r"[>\n]")

Schemas = Mapping[str, Mapping[str, Any]]  # by function: types of its parameters by name


class JsonBody:
    """Parser of `{"name": ..., "arguments": {...}}`; arguments are passed on unchanged."""

    def __init__(self) -> None:
        self._top: list[str] = []  # pieces of the object without nested objects and arrays
        self._end = ""  # the last WINDOW characters of `_top`, with white space collapsed
        self._literal: list[str] | None = None  # pieces of the name's string, once it has begun
        self._name: str | None = None
        self._arguments: list[str] | None = None  # pieces not yet returned; None: the arguments have not begun
        self._is_argument = False  # within the arguments
        self._depth = 0
        self._in_string = False
        self._is_broken = False  # a raw line break in a string is invalid JSON: the end of strings is unknown
        self._is_whole = False
        self._is_name_read = False
        self._held = ""  # a backslash whose escaped character has not arrived

    def push(self, text: str) -> tuple[str | None, str]:
        """Return the function's name when it becomes known, and the next piece of its arguments' JSON, which is empty until then."""
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
        if self._name is None or self._arguments is None:
            return self._name if before is None else None, ""
        piece = "".join(self._arguments)
        self._arguments.clear()
        return self._name if before is None else None, piece

    def is_in_string(self) -> bool:
        """Return whether a marker at this position would be part of a string."""
        return self._in_string and self._depth > 0 and not self._is_broken

    def _quote(self, char: str) -> None:
        self._is_broken |= self._in_string and char == "\n"
        self._in_string ^= char == '"'

    def _bracket(self, char: str) -> None:
        self._depth += 1 if char in "{[" else -1
        if char == "{" and self._depth == 2 and self._arguments is None and ARGUMENTS.search(self._end):
            self._is_argument, self._arguments = True, []
        elif self._depth == 1:
            self._is_argument = False
        elif self._depth == 0:
            self._is_whole = True
            if self._arguments is None:
                found = STRING_OF_ARGUMENTS.search("".join(self._top))
                self._arguments = [(found and _text_of(found[1])) or "{}"]

    def _keep(self, text: str) -> None:
        if self._is_argument:
            assert self._arguments is not None
            self._arguments.append(text)
        elif self._depth < 2:
            self._top.append(text)
            if not self._is_name_read:
                self._read_name(text)
            self._end = WHITE_SPACE.sub(" ", self._end + text)[-WINDOW:]

    def _read_name(self, text: str) -> None:
        """Find the first string that is the value of a member `name`. `text` does not cut an escape sequence."""
        if self._literal is None:
            text = self._end + text
            begin = NAME_BEGIN.search(text)
            if begin is None:
                return
            text, self._literal = text[begin.end() :], []
        rest = STRING_REST.match(text)
        assert rest is not None
        self._literal.append(rest[0])
        if rest.end() < len(text):
            self._is_name_read = True
            self._name = _text_of('"' + "".join(self._literal) + '"')


def _text_of(literal: str) -> str | None:
    """Return the decoded JSON string, with "?" for an unpaired surrogate, or None if it is invalid."""
    try:
        return str(json.loads(literal)).encode("utf-8", "replace").decode()
    except ValueError:
        return None


def _json_of(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or text.encode("utf-8", "replace").decode() == text else json.dumps(value)


class XmlBody:
    """Parser of `<function=name><parameter=x>value</parameter></function>`. A value is JSON unless its schema has the type string."""

    def __init__(self, schemas: Schemas):
        self._schemas = schemas
        self._name: str | None = None
        self._parameter = ""  # parameter being read
        self._until = FUNCTION  # expected marker
        self._pieces: list[str] = []  # text before the marker
        self._held = ""  # may be the beginning of the marker
        self._rest: list[str] = []  # pieces of what follows the function's name, or the last parameter
        self._num_sent = 0

    def push(self, text: str) -> tuple[str | None, str]:
        """Return the function's name when it becomes known, and more of its arguments' JSON. Each character is searched a constant number
        of times."""
        before, members, start, rest = self._name, [], 0, len(self._held)
        text = self._held + text
        while (mark := self._until.search(text, start)) is not None:
            value = "".join((*self._pieces, text[start : mark.start()]))
            self._pieces.clear()
            start = mark.end()
            if self._until is VALUE_END:
                members.append(self._member(value.removeprefix("\n").removesuffix("\n")))
            if self._take(mark[0], value.strip()):
                self._rest.clear()
                rest = start
        keep = len(text) if self._until is NAME_END else possible_start(text, self._until.pattern)
        self._pieces.append(text[start:keep])
        self._held = text[keep:]
        self._rest.append(text[rest:])
        return self._name if before is None else None, "".join(members)

    def close(self, is_cut: bool) -> str:
        """Return the rest of the JSON at the end. `is_cut`: a stop string ended the text."""
        if self._name is None or (is_cut and not "".join(self._rest).lstrip().startswith(XML_END)):
            return ""
        return "}" if self._num_sent else "{}"

    def _take(self, mark: str, value: str) -> bool:
        """Continue after the expected marker with the text before it. Return whether the function's name or a parameter is complete."""
        is_whole, seeks = False, FUNCTION if self._name is None else PARAMETER
        if self._until in (FUNCTION, PARAMETER):
            self._until = NAME_END
        elif self._until is VALUE_END:
            self._until, is_whole = PARAMETER, True
        elif mark == "\n":  # a name cannot contain a line break
            self._until = seeks
        elif self._name is None:
            self._name, self._until, is_whole = value, PARAMETER, True
        else:
            self._parameter, self._until = value, VALUE_END
        return is_whole

    def _member(self, text: str) -> str:
        opening = ", " if self._num_sent else "{"
        self._num_sent += 1
        return f"{opening}{json.dumps(self._parameter, ensure_ascii=False)}: {self._value(self._parameter, text)}"

    def _value(self, parameter: str, text: str) -> str:
        schema = self._schemas.get(self._name or "", {}).get(parameter)
        if not (isinstance(schema, dict) and schema.get("type") == "string"):
            try:
                return _json_of(json.loads(text))
            except (ValueError, RecursionError):  # invalid JSON, or nested too deeply
                pass
        return json.dumps(text, ensure_ascii=False)


class CallSplitter:
    """Splits the text of one answer into shown text and calls. `is_single`: end the answer after the first call."""

    def __init__(self, schemas: Schemas, is_single: bool):
        self._schemas = schemas
        self._is_single = is_single
        self._held = ""  # may be the beginning of a marker
        self._spaces: list[str] = []  # white space before `_held`, which is not shown before a call
        self._shown = ""  # text to return
        self._deltas: list[CallDelta] = []  # deltas to return
        self._body: JsonBody | XmlBody | None = None
        self.is_inside = False  # a call has begun and not ended
        self._raw: list[str] = []  # text of the call so far, to be shown if it turns out not to be a call
        self._begin = ""  # start of the call, until its notation is known
        self._is_after_call = False  # then white space is not shown
        self._has_name = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta], bool]:
        """Return the text to show, deltas of calls, and whether the answer ends here."""
        self._held += text
        goes_on, is_done = True, False
        while self._held and goes_on and not is_done:
            goes_on = self._read_call() if self.is_inside else self._read_text()
            is_done = self._is_single and self.num_calls > 0 and not self.is_inside
        if is_done:
            self._held = ""
        return *self._take(), is_done

    def flush(self, is_cut: bool = False) -> tuple[str, list[CallDelta]]:
        """Return the rest at the end of the text or at a stop string (`is_cut`)."""
        held, self._held = self._held, ""
        if not self.is_inside:
            self._shown += "".join((*self._spaces, held))
            self._spaces.clear()
        else:
            if held.startswith(CLOSE):
                self._raw.append(held)
            else:
                self._feed(held)
            self._end_call(is_cut)
        return self._take()

    def _take(self) -> tuple[str, list[CallDelta]]:
        taken = self._shown, self._deltas
        self._shown, self._deltas = "", []
        return taken

    def _read_text(self) -> bool:
        """Parse up to the next call. Return False if more text is needed."""
        held = self._held.lstrip() if self._is_after_call else self._held
        self._is_after_call = self._is_after_call and not held
        before, begins, rest = held.partition(OPEN)
        end = len(before) if begins else possible_start(held, OPEN)
        shown = held[:end].rstrip()
        if shown:
            self._shown += "".join((*self._spaces, shown))
            self._spaces.clear()
        if begins:
            self._spaces.clear()
            self._held, self._raw, self._begin = rest, [OPEN], ""
            self.is_inside, self._has_name, self._body = True, False, None
        else:
            self._spaces.append(held[len(shown) : end])
            self._held = held[end:]
        return bool(begins)

    def _read_call(self) -> bool:
        """Parse up to the call's end or apparent end. Return False if more text is needed."""
        found = self._held.find(CLOSE)
        end = found if found >= 0 else possible_start(self._held, CLOSE)
        self._feed(self._held[:end])
        self._held = self._held[end:]
        if found < 0:
            return False
        rest = self._held[len(CLOSE) :]
        if isinstance(self._body, JsonBody) and self._body.is_in_string():
            if len(rest) <= MAX_SPACES and not rest.strip(" "):
                return False  # strings do not continue after a line break or the end
            if not rest.lstrip(" ").startswith("\n"):
                self._held = rest
                self._feed(CLOSE)
                return True
        self._held = rest
        self._raw.append(CLOSE)
        self._end_call()
        return True

    def _feed(self, text: str) -> None:
        self._raw.append(text)
        if self._body is None:
            text = self._begin = (self._begin + text).lstrip()
            if XML_MARK.startswith(text):
                return
            self._body = XmlBody(self._schemas) if text.startswith(XML_MARK) else JsonBody()
        name, arguments = self._body.push(text)
        if name is not None:
            self._has_name = True
        if name is not None or arguments:
            self._deltas.append(CallDelta(self.num_calls, arguments, name))

    def _end_call(self, is_cut: bool = False) -> None:
        rest = self._body.close(is_cut) if isinstance(self._body, XmlBody) else ""
        self.is_inside = False
        if self._has_name:
            if rest:
                self._deltas.append(CallDelta(self.num_calls, rest))
            self.num_calls += 1
            self._is_after_call = True
        else:
            self._shown += "".join(self._raw)
