"""Tool calls out of a scripted text, however it is cut into pieces: nothing is lost or shown twice."""

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.messages import CallDelta
from server.processor.text import calls
from server.processor.text.calls import MAX_HEAD, CallSplitter

SCHEMAS = {"weather": {"city": {"type": "string"}, "days": {"type": "integer"}, "code": {"type": "string"}}}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln \\"}{\\" 🌧", "days": [1, {"a": null}]}}\n</tool_call>'
XML_CITY, XML_DAYS = "<parameter=city>\nKöln\n2\n</parameter>", "<parameter=days>\n3\n</parameter>"
XML = f"<tool_call>\n<function=weather>\n{XML_CITY}\n{XML_DAYS}\n</function>\n</tool_call>"
ARGUMENTS = {"city": 'Köln "}{" 🌧', "days": [1, {"a": None}]}
XML_ARGUMENTS = {"city": "Köln\n2", "days": 3}

# text; what is shown; calls as (name, arguments)
CASES = {
    "no call": ("just text <tool", "just text <tool", []),
    "only a call": (HERMES, "", [("weather", ARGUMENTS)]),
    "text before": ("Let me see.\n\n" + HERMES, "Let me see.", [("weather", ARGUMENTS)]),
    "text around": ("a " + HERMES + "\n b", "ab", [("weather", ARGUMENTS)]),
    "two calls": (HERMES + "\n" + HERMES, "", [("weather", ARGUMENTS)] * 2),
    "both notations": (HERMES + XML, "", [("weather", ARGUMENTS), ("weather", XML_ARGUMENTS)]),
    "xml": ("ok " + XML, "ok", [("weather", XML_ARGUMENTS)]),
    "xml without parameters": ("<tool_call><function=now></function></tool_call>", "", [("now", {})]),
    "xml string that looks like a number": (
        "<tool_call><function=weather><parameter=code>0123</parameter></function></tool_call>", "", [("weather", {"code": "0123"})],
    ),
    "arguments first": ('<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', "", [("f", {"a": [1]})]),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [("f", {"a": 1})]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    "null arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    "empty arguments": ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", {})]),
    "arguments in a string": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"}\\"}", "x": 1}</tool_call>', "", [("f", {"a": "}"})]),
    "other members": ('<tool_call>{"id": {"name": "g"}, "n": 1.5, "name": "f", "arguments": {}}</tool_call>', "", [("f", {})]),
    "a brace too few": ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", {"a": 1})]),
    "a brace too many": ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', "", [("f", {"a": 1})]),
    "no closing marker": ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
    "no call at all": ("<tool_call>what?</tool_call>!", "<tool_call>what?</tool_call>!", []),
    "a quote in no call": ('<tool_call>say "hi</tool_call>! ' + HERMES, '<tool_call>say "hi</tool_call>!', [("weather", ARGUMENTS)]),
    "nothing in it": ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    "only an opening": ("x <tool_call>", "x<tool_call>", []),
}  # fmt: skip


def read(pieces: list[str], is_single: bool = False) -> tuple[str, list[CallDelta], bool]:
    splitter = CallSplitter(SCHEMAS, is_single)
    shown, deltas, is_done = [], [], False
    for piece in pieces:
        text, found, is_done = splitter.push(piece)
        shown.append(text)
        deltas += found
        if is_done:
            return "".join(shown), deltas, True
    text, found = splitter.flush()
    return "".join([*shown, text]), deltas + found, False


def calls_of(deltas: list[CallDelta]) -> list[tuple[str, object]]:
    found: list[tuple[str, list[str]]] = []
    for delta in deltas:
        assert (delta.name is not None) == (delta.index == len(found)), "the first piece of a call has its name, and no other"
        if delta.name is not None:
            found.append((delta.name, []))
        found[delta.index][1].append(delta.arguments)
    return [(name, json.loads("".join(pieces))) for name, pieces in found]


def test_every_cut_gives_the_same() -> None:
    for name, (text, shown, expected) in CASES.items():
        cuts = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
        draw = random.Random(0)
        for _ in range(30):
            marks = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randint(2, 8))))
            cuts.append([text[a:b] for a, b in itertools.pairwise([0, *marks, len(text)])])
        for pieces in cuts:
            said, deltas, _ = read(pieces)
            assert (said, calls_of(deltas)) == (shown, expected), (name, pieces)


def test_the_name_does_not_wait_for_the_arguments() -> None:
    for text, arguments in ((HERMES, ARGUMENTS), (XML, XML_ARGUMENTS)):
        splitter, found = CallSplitter(SCHEMAS, False), list[tuple[int, CallDelta]]()
        assert splitter.push("Hello")[0] == "Hello" and splitter.push(" there <b>")[0] == " there <b>"
        for number, char in enumerate(text, 1):
            found += [(number, delta) for delta in splitter.push(char)[1]]
        (begin, name), (end, rest) = found
        assert begin < 35 and name == CallDelta(0, "", "weather")
        assert end == len(text) and rest.name is None and json.loads(rest.arguments) == arguments


def test_a_cut_call_shows_its_raw_text() -> None:
    whole = ((HERMES, ARGUMENTS), (HERMES[:-14], ARGUMENTS), (XML[:-13], XML_ARGUMENTS))
    cut = (HERMES[:60], HERMES[:60].partition('"arguments": ')[2]), (HERMES[:40], ""), (XML[:70], XML[:70].partition("weather>")[2])
    for text, expected in (*whole, *cut, ('<tool_call>{"name": "f", "arguments": {"a": NaN', '{"a": NaN')):
        splitter = CallSplitter(SCHEMAS, False)
        arguments = calls_text([*splitter.push(text)[1], *splitter.flush(is_cut=True)[1]])
        assert (arguments if isinstance(expected, str) else json.loads(arguments)) == expected, text


def test_values_in_xml_are_json() -> None:
    for value, expected in (("NaN", "NaN"), ("-Infinity", "-Infinity"), ('[1, "a"]', [1, "a"]), ("1" * 31, int("1" * 31)), ("1e999", "")):
        text = f"<tool_call><function=f><parameter=x>{value}</parameter></function></tool_call>"
        arguments = calls_text(CallSplitter({}, False).push(text)[1])
        assert "Infinity" not in arguments.replace('"-Infinity"', "")
        assert arguments == '{"x": 1e999}' if value == "1e999" else json.loads(arguments) == {"x": expected}


def calls_text(deltas: list[CallDelta]) -> str:
    return "".join(delta.arguments for delta in deltas)


def test_a_single_call_ends_the_answer() -> None:
    for pieces in ([HERMES + " x " + HERMES], list(HERMES + " x " + HERMES)):
        shown, deltas, is_done = read(pieces, is_single=True)
        assert (shown, calls_of(deltas), is_done) == ("", [("weather", ARGUMENTS)], True)


CITY = {"f": {"city": {"type": "string"}}}
WORDS = [
    "<function=", "</function>", "<parameter=", "city", "days", "</parameter>", ">", "\n", " ", "   ", "{", "}", "[", "]", '"name"', '"f"',
    '"arguments"', '"parameters"', ":", " : ", '"', "\\", '\\"', "1", ",", "<", "</par", '"name": "f"', '"arguments": {', "é", "\\u00e9",
]  # fmt: skip
CUTS = st.lists(st.integers(0, 400), max_size=10)


@given(st.lists(st.sampled_from([*WORDS, "<tool_call>", "</tool_call>", "<tool_call>\n<function=f>", "<tool", "\n\n"]), max_size=40), CUTS)
def test_cuts_make_no_difference(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)

    def told(pieces: Iterator[str]) -> tuple[str, list[list[str]]]:
        splitter, shown, found = CallSplitter(CITY, is_single=False), "", []
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
    examined = 0

    def __init__(self, pattern: re.Pattern[str]):
        self._pattern, self.pattern = pattern, pattern.pattern

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        match = self._pattern.search(text, start)
        Counting.examined += (match.end() if match else len(text)) - start
        return match

    def match(self, text: str, start: int = 0) -> re.Match[str] | None:
        match = self._pattern.match(text, start)
        Counting.examined += (match.end() if match else len(text)) - start
        return match

    def sub(self, new: str, text: str) -> str:
        Counting.examined += len(text)
        return self._pattern.sub(new, text)


LENGTH = 1500
MAX_PER_CHARACTER = 40


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
    "markers in a string": ['<tool_call>{"name": "f", "arguments": {"a": "', *["</tool_call>", "xxxxx"] * LENGTH, '"}}</tool_call>'],
    "spaces in a call": ["<tool_call>", *["  "] * LENGTH],
    "spaces in a text": ["text", *[" \n"] * LENGTH, "."],
    "no call": ["<tool_call>", *["word "] * LENGTH, "</tool_call>."],
}


def strings_in(value: Any) -> Iterator[int]:
    for kept in vars(value).values():
        if isinstance(kept, str):
            yield len(kept)


def test_each_character_is_examined_a_constant_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern, value in list(vars(calls).items()):
        if isinstance(value, re.Pattern):
            monkeypatch.setattr(calls, pattern, Counting(value))
    for name, pieces in HOSTILE.items():
        splitter, Counting.examined = CallSplitter(CITY, is_single=False), 0
        for piece in pieces:
            splitter.push(piece)
            assert max(strings_in(splitter)) <= MAX_HEAD, f"{name}: what is kept in one string is copied with each token"
        splitter.flush()
        assert Counting.examined <= MAX_PER_CHARACTER * sum(map(len, pieces)) + MAX_HEAD**2 / 2, name


def test_odd_json_does_not_end_the_processor() -> None:
    for text, name, arguments in (
        (r'{"name": "a\ud800", "arguments": {}}', "a?", {}), (r'{"name": "a", "arguments": "{\"x\": \"\ud800\"}"}', "a", {"x": "?"}),
        (r'<function=a><parameter=x>"\ud800"</parameter></function>', "a", {"x": "\ud800"}),
        (r'<function=a><parameter=x>"\ud83d\ude00 é"</parameter></function>', "a", {"x": "😀 é"}),
        ("<function=a><parameter=x>" + "[" * 100_000 + "</parameter></function>", "a", {"x": "[" * 100_000}),
    ):  # fmt: skip
        deltas = CallSplitter({}, is_single=False).push(f"<tool_call>{text}</tool_call>")[1]
        msgspec.msgpack.encode(deltas)
        assert (deltas[0].name, json.loads("".join(delta.arguments for delta in deltas))) == (name, arguments)
