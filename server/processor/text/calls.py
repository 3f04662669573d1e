"""Parser of tool calls in streamed text: text passes through, a call becomes its name, and its arguments when it is complete.

    Hermes (Qwen3-VL):        <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    XML (the coder models):   <tool_call><function=name><parameter=x>...</parameter></function></tool_call>

Text that may begin a marker is held back, and white space before it. The first closing marker ends a call, also in a string. The time is
linear in the length of the text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Never

from engine.wire.messages import CallDelta

OPEN, CLOSE = "<tool_call>", "</tool_call>"
XML_END, VALUE_END = "</function>", "</parameter>"
MAX_HEAD = 320  # characters of a call in which its name is sought before its end
NAME = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\\n]++|\\.)*+")|<function=([^>\n]*)>')
MEMBER = re.compile(r'[\s,{]*+("(?:[^"\\]++|\\.)*+")\s*:\s*', re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")

Schemas = Mapping[str, Mapping[str, Any]]  # by function: schemas of its parameters by name


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # an unpaired surrogate becomes "?"


def json_call(text: str) -> tuple[str | None, str]:
    """Return name and arguments of a call in JSON; arguments that are no JSON as they are."""
    name, arguments, position = None, "", max(0, text.find("{"))
    while (member := MEMBER.match(text, position)) is not None:
        start = member.end()
        try:
            value, position = DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            value, position = None, len(text)
        if member[1] == '"name"' and isinstance(value, str) and name is None:
            name = _sendable(value)
        elif member[1] in ('"arguments"', '"parameters"'):
            arguments = _sendable(value) if isinstance(value, str) else text[start:position]
    is_empty = arguments == "null" or (not arguments and text.rstrip().endswith("}"))
    return name, "{}" if is_empty else arguments


def xml_arguments(text: str, schemas: Mapping[str, Any], is_cut: bool) -> str:
    """Return arguments as JSON; those of a truncated call as they are. A value is JSON unless its schema has the type string."""
    members: list[str] = []
    position = 0
    while (parameter := PARAMETER.search(text, position)) is not None and (end := text.find(VALUE_END, parameter.end())) >= 0:
        name, value, position = parameter[1].strip(), text[parameter.end() : end], end + len(VALUE_END)
        members.append(f"{json.dumps(name, ensure_ascii=False)}: {_json_value(schemas.get(name), value)}")
    return text if is_cut and XML_END not in text[position:] else "{" + ", ".join(members) + "}"


def _json_value(schema: object, text: str) -> str:
    if not (isinstance(schema, dict) and schema.get("type") == "string"):
        try:
            DECODER.decode(text)
            return text.strip()
        except (ValueError, RecursionError):  # invalid JSON, or nested too deeply
            pass
    return json.dumps(text.removeprefix("\n").removesuffix("\n"), ensure_ascii=False)


class CallSplitter:
    """Splits an answer into shown text and calls. `is_single`: end it after the first call."""

    def __init__(self, schemas: Schemas, is_single: bool):
        self._schemas = schemas
        self._is_single = is_single
        self._held = ""  # may be the beginning of a marker
        self._spaces: list[str] = []  # white space before `_held`, which is not shown before a call
        self._shown = ""  # text to return
        self._deltas: list[CallDelta] = []  # deltas to return
        self.is_inside = False  # a call has begun and not ended
        self._is_after_call = False  # then white space is not shown
        self.num_calls = 0
        self._begin()

    def _begin(self) -> None:
        self._pieces: list[str] = []  # of the call
        self._head = ""  # its first characters, without white space before it
        self._name: str | None = None

    def push(self, text: str) -> tuple[str, list[CallDelta], bool]:
        """Return text, deltas of calls, and whether the answer ends here."""
        self._held += text
        goes_on, is_done = True, False
        while self._held and goes_on and not is_done:
            goes_on = self._read_call() if self.is_inside else self._read_text()
            is_done = self._is_single and self.num_calls > 0 and not self.is_inside
        if is_done:
            self._held = ""
        return *self._take(), is_done

    def flush(self, is_cut: bool = False) -> tuple[str, list[CallDelta]]:
        held, self._held = self._held, ""
        if not self.is_inside:
            self._shown += "".join((*self._spaces, held))
            self._spaces.clear()
        else:
            self._feed(held)
            self._end_call("", is_cut)
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
            self._held, self.is_inside = rest, True
            self._begin()
        else:
            self._spaces.append(held[len(shown) : end])
            self._held = held[end:]
        return bool(begins)

    def _read_call(self) -> bool:
        """Parse up to the call's end. Return False if more text is needed."""
        found = self._held.find(CLOSE)
        end = found if found >= 0 else possible_start(self._held, CLOSE)
        self._feed(self._held[:end])
        self._held = self._held[end:]
        if found < 0:
            return False
        self._held = self._held[len(CLOSE) :]
        self._end_call(CLOSE)
        return True

    def _feed(self, text: str) -> None:
        self._pieces.append(text)
        if self._name is None and len(self._head) < MAX_HEAD:
            self._head = (self._head + text).lstrip()[:MAX_HEAD]
            if (found := NAME.match(self._head)) is not None:
                self._name = json_call(found[0])[0] if found[1] else found[2].strip()
                self._deltas += () if self._name is None else (CallDelta(self.num_calls, "", self._name),)

    def _end_call(self, marker: str, is_cut: bool = False) -> None:
        text, name = "".join(self._pieces), self._name
        if self._head.startswith("<") and name is not None:
            arguments = xml_arguments(text.partition(">")[2], self._schemas.get(name, {}), is_cut)
        else:
            name, arguments = json_call(text)
        self.is_inside = False
        if name is None:
            self._shown += OPEN + text + marker
        else:
            self._deltas.append(CallDelta(self.num_calls, arguments, name if self._name is None else None))
            self.num_calls += 1
            self._is_after_call = True


def possible_start(text: str, marker: str) -> int:
    """Return the start of the longest suffix of `text` that begins `marker`, or the text's length."""
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0:
        if marker.startswith(text[start:]):
            return start
        start = text.find(marker[0], start + 1)
    return len(text)
