"""The parser of tool calls: what it finds does not depend on cuts, and each character costs the same."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.processor import calls
from server.processor.calls import CallSplitter, JsonBody, XmlBody

SCHEMAS = {"f": {"city": {"type": "string"}}}
WORDS = [
    "<function=", "</function>", "<parameter=", "city", "days", "</parameter>", ">", "\n", " ", "   ", "{", "}", "[", "]", '"name"', '"f"',
    '"arguments"', '"parameters"', ":", " : ", '"', "\\", '\\"', "1", ",", "<", "</par", '"name": "f"', '"arguments": {', "é", "\\u00e9",
]  # fmt: skip
CUTS = st.lists(st.integers(0, 400), max_size=10)


def read(body: JsonBody | XmlBody, pieces: Iterator[str]) -> tuple[str | None, str]:
    """The name, which must come once, and the arguments."""
    found = [body.push(piece) for piece in pieces]
    names = [name for name, _ in found if name is not None]
    assert len(names) < 2
    return (names[0] if names else None), "".join(arguments for _, arguments in found)


@given(st.lists(st.sampled_from([*WORDS, "<tool_call>", "</tool_call>", "<tool_call>\n<function=f>", "<tool", "\n\n"]), max_size=40), CUTS)
def test_cuts_make_no_difference(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)

    def told(pieces: Iterator[str]) -> tuple[str, list[list[str]]]:
        splitter, shown, found = CallSplitter(SCHEMAS, is_single=False), "", []
        for said, deltas in [*(splitter.push(piece)[:2] for piece in pieces), splitter.flush()]:
            shown += said
            for delta in deltas:
                if delta.name is not None:
                    found.append([delta.name, ""])
                found[delta.index][1] += delta.arguments
        return shown, found

    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = (text[start:end] for start, end in itertools.pairwise(borders))
    assert told(pieces) == told(iter([text])) == told(iter(text))


class Counting:
    """A pattern that counts the characters that it may look at."""

    examined = 0

    def __init__(self, pattern: re.Pattern[str]):
        self._pattern, self.pattern = pattern, pattern.pattern

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        match = self._pattern.search(text, start)
        Counting.examined += (match.end() if match else len(text)) - start
        return match

    def match(self, text: str) -> re.Match[str] | None:
        Counting.examined += len(text)
        return self._pattern.match(text)

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        Counting.examined += len(text)
        return self._pattern.finditer(text)

    def sub(self, new: str, text: str) -> str:
        Counting.examined += len(text)
        return self._pattern.sub(new, text)


LENGTH = 1500
MAX_PER_CHARACTER = 40


IN_STRING = '<tool_call>{"name": "f", "arguments": {"a": "'


HOSTILE: dict[str, list[str]] = {
    "parameters without end": ["<tool_call>\n<function=f>", *["<parameter=a>"] * LENGTH],
    "a function without end": ["<tool_call>\n", *["<function="] * LENGTH],
    "functions in lines": ["<tool_call>\n", *["<function=\n"] * LENGTH],
    "a long parameter": ["<tool_call>\n<function=f>\n<parameter=city>\n", *["word "] * LENGTH, "\n</parameter>\n</function>\n</tool_call>"],
    "text after a function": ["<tool_call>\n<function=f>", *["word "] * LENGTH],
    "names at top level": ["<tool_call>{", *['"name" ', '"x", '] * (LENGTH // 2)],
    "a name without end": ['<tool_call>{"name": "', *["word "] * LENGTH],
    "objects at top level": ["<tool_call>{", *['"x": {}, '] * LENGTH],
    "arguments before the name": ['<tool_call>{"arguments": {"a": "', *["word "] * LENGTH, '"}, "name": "f"}</tool_call>'],
    "spaces after a key": ['<tool_call>{"name"', *[" "] * LENGTH],
    "spaces after a marker in a string": [IN_STRING, "</tool_call>", *["  "] * LENGTH],
    "markers in a string": [IN_STRING, *["</tool_call>", "xxxxx"] * LENGTH, '"}}</tool_call>'],
    "spaces in a call": ["<tool_call>", *["  "] * LENGTH],
    "spaces in a text": ["text", *[" \n"] * LENGTH, "."],
    "no call": ["<tool_call>", *["word "] * LENGTH, "</tool_call>."],
}


def strings_in(value: Any) -> Iterator[int]:
    """Lengths of the strings that an object keeps, in itself and in its parts, but not in lists: those are only joined once."""
    for kept in vars(value).values():
        if isinstance(kept, str):
            yield len(kept)
        elif isinstance(kept, JsonBody | XmlBody):
            yield from strings_in(kept)


def test_each_character_is_examined_a_constant_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token was followed by a search of the whole call: an honest long parameter took quadratic time, an endless one cubic time."""
    for pattern, value in list(vars(calls).items()):
        if isinstance(value, re.Pattern):
            monkeypatch.setattr(calls, pattern, Counting(value))
    for name, pieces in HOSTILE.items():
        splitter, Counting.examined = CallSplitter(SCHEMAS, is_single=False), 0
        for piece in pieces:
            splitter.push(piece)
            assert max(strings_in(splitter)) <= 128, f"{name}: what is kept in one string is copied with each token"
        splitter.flush()
        assert Counting.examined <= MAX_PER_CHARACTER * sum(map(len, pieces)), name


def test_odd_json_does_not_end_the_processor() -> None:
    """Half a surrogate pair could not be sent to the api, and JSON that is too deep could not be read: both ended the engine."""
    for text, name, arguments in (
        (r'{"name": "a\ud800", "arguments": {}}', "a?", {}), (r'{"name": "a", "arguments": "{\"x\": \"\ud800\"}"}', "a", {"x": "?"}),
        (r'<function=a><parameter=x>"\ud800"</parameter></function>', "a", {"x": "\ud800"}),
        (r'<function=a><parameter=x>"\ud83d\ude00 é"</parameter></function>', "a", {"x": "😀 é"}),
        ("<function=a><parameter=x>" + "[" * 100_000 + "</parameter></function>", "a", {"x": "[" * 100_000}),
    ):  # fmt: skip
        deltas = CallSplitter({}, is_single=False).push(f"<tool_call>{text}</tool_call>")[1]
        msgspec.msgpack.encode(deltas)
        assert (deltas[0].name, json.loads("".join(delta.arguments for delta in deltas))) == (name, arguments)


def test_a_function_without_a_name_is_named_once() -> None:
    """An empty name was sent again with each token."""
    assert read(XmlBody({}), iter("<function=><parameter=x>1</parameter>"))[0] == ""
    assert read(JsonBody(), iter('{"name": "", "arguments": {"x": 1}}'))[0] == ""
