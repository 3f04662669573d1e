"""Tool calls out of a scripted text, however it is cut into pieces: nothing is lost, shown twice, or held back until its end."""

import itertools
import json
import random

from engine.messages import CallDelta
from server.processor.calls import CLOSE, CallSplitter

SCHEMAS = {"weather": {"city": {"type": "string"}, "days": {"type": "integer"}, "code": {"type": "string"}}}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln \\"}{\\" 🌧", "days": [1, {"a": null}]}}\n</tool_call>'
XML_CITY, XML_DAYS = "<parameter=city>\nKöln\n2\n</parameter>", "<parameter=days>\n3\n</parameter>"
XML = f"<tool_call>\n<function=weather>\n{XML_CITY}\n{XML_DAYS}\n</function>\n</tool_call>"
ARGUMENTS = {"city": 'Köln "}{" 🌧', "days": [1, {"a": None}]}
MARKERS = 'x</tool_call>\n"<tool_call>'
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
    "markers in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>\\n\\"<tool_call>"}}</tool_call>b', "b", [("f", {"a": MARKERS})],
    ),
    "markers in a string of a string": (
        '<tool_call>{"arguments": "{\\"a\\": \\"</tool_call></tool_call>\\"}", "name": "f"}</tool_call>', "", [("f", {"a": CLOSE + CLOSE})],
    ),
    "no call at all": ("<tool_call>what?</tool_call>!", "<tool_call>what?</tool_call>!", []),
    "a quote in no call": ('<tool_call>say "hi</tool_call>! ' + HERMES, '<tool_call>say "hi</tool_call>!', [("weather", ARGUMENTS)]),
    "nothing in it": ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    "only an opening": ("x <tool_call>", "x<tool_call>", []),
}  # fmt: skip


def read(pieces: list[str], is_single: bool = False) -> tuple[str, list[CallDelta], bool]:
    splitter = CallSplitter(SCHEMAS, is_single)
    shown, deltas, is_done = [], [], False
    for piece in pieces:
        text, calls, is_done = splitter.push(piece)
        shown.append(text)
        deltas += calls
        if is_done:
            return "".join(shown), deltas, True
    text, calls = splitter.flush()
    return "".join([*shown, text]), deltas + calls, False


def calls_of(deltas: list[CallDelta]) -> list[tuple[str, object]]:
    """As a client puts them together."""
    calls: list[tuple[str, list[str]]] = []
    for delta in deltas:
        assert (delta.name is not None) == (delta.index == len(calls)), "the first piece of a call has its name, and no other"
        if delta.name is not None:
            calls.append((delta.name, []))
        calls[delta.index][1].append(delta.arguments)
    return [(name, json.loads("".join(pieces))) for name, pieces in calls]


def test_every_cut_gives_the_same() -> None:
    for name, (text, shown, calls) in CASES.items():
        cuts = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
        draw = random.Random(0)
        for _ in range(30):
            marks = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randint(2, 8))))
            cuts.append([text[a:b] for a, b in itertools.pairwise([0, *marks, len(text)])])
        for pieces in cuts:
            said, deltas, _ = read(pieces)
            assert (said, calls_of(deltas)) == (shown, calls), (name, pieces)


def test_arguments_do_not_wait_for_the_end() -> None:
    splitter = CallSplitter(SCHEMAS, False)
    assert splitter.push("Hello")[0] == "Hello"
    assert splitter.push(" there <b>")[0] == " there <b>"
    (begin,) = splitter.push('<tool_call>{"name": "f", "arguments": {"text": "once')[1]
    assert (begin.name, begin.arguments) == ("f", '{"text": "once')
    for word in (" upon", " a", " time"):
        assert [delta.arguments for delta in splitter.push(word)[1]] == [word]
    assert [delta.arguments for delta in splitter.push('"}}</tool_call>')[1]] == ['"}']


def test_a_string_that_is_no_json_hides_no_marker() -> None:
    """Red if a quote that a model forgets swallows the calls behind it: line breaks stand in no JSON string."""
    begin = '<tool_call>{"name": "g", "arguments": {"a": "x'
    for broken, num_calls in (
        ("}}\n</tool_call>", 2),  # a string that never ends
        ('\n"y"}}</tool_call>', 2),  # an odd quote, in the line behind
        ("}}</tool_call>\n", 2), ("}}</tool_call>  \n", 2),  # the same in one line, and the next call in another
        ("}}</tool_call>", 1),  # nothing says that it is none
    ):  # fmt: skip
        text = begin + broken + HERMES
        for pieces in ([text], list(text)):
            _, deltas, _ = read(pieces)
            assert [delta.name for delta in deltas if delta.name is not None] == ["g", "weather"][:num_calls]
        behind = [CallDelta(0, delta.arguments, delta.name) for delta in deltas if delta.index == 1]
        assert calls_of(behind) == [("weather", ARGUMENTS)] * (num_calls - 1)


def test_a_marker_that_ends_the_text_is_in_no_string() -> None:
    """Red if what ends the text is passed on as part of an argument, or if a call that is none loses it."""
    named = ('{"name": "g", "arguments": {"a": "x}}', "", '{"a": "x}}')
    for text, shown, arguments in (named, ('{"nam', '<tool_call>{"nam</tool_call>', "")):
        for whole in (f"<tool_call>{text}</tool_call>", f"<tool_call>{text}</tool_call> "):
            for pieces in ([whole], list(whole)):
                said, deltas, _ = read(pieces)
                assert (said.rstrip(), "".join(delta.arguments for delta in deltas)) == (shown, arguments)


def test_a_single_call_ends_the_answer() -> None:
    for pieces in ([HERMES + " x " + HERMES], list(HERMES + " x " + HERMES)):
        shown, deltas, is_done = read(pieces, is_single=True)
        assert (shown, calls_of(deltas), is_done) == ("", [("weather", ARGUMENTS)], True)


def test_damage_never_raises() -> None:
    draw = random.Random(1)
    for _ in range(3000):
        text = list(HERMES if draw.random() < 0.5 else XML)
        for _ in range(draw.randint(1, 6)):
            text[draw.randrange(len(text))] = draw.choice('{}[]",:\\<>/ax1 ')
        _, deltas, _ = read(["".join(text)])
        names = [delta.name is not None for delta in deltas]
        assert not names or names[0]
        assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
