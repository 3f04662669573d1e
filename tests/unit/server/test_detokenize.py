"""The detokeniser, stop strings and events: what the server does for each token does not grow with what came before."""

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from engine.wire.messages import Event
from engine.wire.params import OutputOptions
from engine.wire.reports import PromptLogprobs
from server.api.dialects.generate import GenerateFormat, GenerateRequest
from server.api.http.streaming import Choice, ReplyOptions
from server.processor.text import output_text
from server.processor.text.output_text import Detokenizer, OutputText, StopMatcher, ThinkTokens, TokenTable
from server.processor.text.scores import of_prompt


def pieces_of(table: TokenTable, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(table)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def test_pieces_add_up_and_no_character_is_split(tokenizer: Tokenizer, table: TokenTable) -> None:
    for text in ("plain words", "naïve café", "日本語テキスト", "👩‍👩‍👧‍👦 and 🇩🇪", "\n\t  x", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "<think>so</think>"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        pieces = pieces_of(table, ids)
        assert "".join(pieces) == text and not any("�" in piece for piece in pieces)
    ids = tokenizer.encode("one two three", add_special_tokens=False).ids
    assert pieces_of(table, ids)[:-1] == [tokenizer.decode([token_id]) for token_id in ids]


STOPS: list[tuple[list[str], list[str], list[str], bool]] = [
    (["END"], ["a", " E", "N", "D b"], ["a", " ", "", ""], True), (["END"], ["a E", "N", "x"], ["a ", "", "ENx", ""], False),
    (["END"], ["EN"], ["", "EN"], False), (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], True),
    (["ab", "abc"], ["xab", "c"], ["x"], True), (["bc", "abcd"], ["a", "bc"], ["", "a"], True),
    (["aab"], ["aa", "a", "b"], ["", "a", ""], True), (["abc"], ["ax", "ab", "y"], ["ax", "", "aby", ""], False),
    (["🙂"], ["x", "🙂y"], ["x", ""], True), ([], ["END"], ["END", ""], False),
]  # fmt: skip


def test_random_ids_decode_as_the_tokenizer_does(tokenizer: Tokenizer, table: TokenTable) -> None:
    draw = random.Random(0)
    for _ in range(500):
        ids = [draw.choice([draw.randrange(256), draw.randrange(5000)]) for _ in range(draw.randrange(12))]
        assert "".join(pieces_of(table, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_other_tokenizers_are_refused() -> None:
    with pytest.raises(ValueError, match="byte-level"):
        TokenTable(Tokenizer(models.BPE()))


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        text, is_stopped = matcher.push(piece)
        shown.append(text)
        if is_stopped:
            return shown, True
    return [*shown, matcher.flush()], False


def test_stop_strings() -> None:
    for stops, pieces, shown, is_stopped in STOPS:
        assert run(stops, pieces) == (shown, is_stopped)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(st.text("abc", max_size=3), max_size=15))
def test_stops_equal_a_search_of_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    shown, is_stopped = run(stops, pieces)
    ends = [("".join(pieces[: i + 1])) for i in range(len(pieces))]
    first = next((text for text in ends if any(stop in text for stop in stops)), None)
    if first is None:
        assert ("".join(shown), is_stopped) == ("".join(pieces), False)
    else:
        assert ("".join(shown), is_stopped) == (first[: min(first.find(stop) for stop in stops if stop in first)], True)


def test_streams_that_repeat_the_answer_take_linear_time() -> None:

    def num_bytes(num_tokens: int) -> tuple[int, int]:
        made = GenerateFormat(ReplyOptions("m", 0), asked=GenerateRequest(text="x"))
        choice, events = Choice(0), []
        for i in range(num_tokens):
            reason = "length" if i == num_tokens - 1 else None
            event = Event(1, "word ", i + 1, finish_reason=reason, token_ids=[7])
            choice.note(event)
            events.append(made.token_chunk(choice, event, {}))
        shown = [json.loads(event.removeprefix(b"data: ")) for event in events if event]
        assert [len(one["output_ids"]) for one in shown[:256]] == [*range(1, 257)][: len(shown)]
        assert shown[-1]["text"] == "word " * num_tokens and len(shown[-1]["output_ids"]) == num_tokens
        return sum(map(len, events)), len(shown)

    size, count = num_bytes(200)
    assert count == 200
    (size, _), (double, _) = num_bytes(2000), num_bytes(4000)
    assert double < 2.5 * size


def test_white_space_at_the_end_of_a_prompt(tokenizer: Tokenizer, table: TokenTable) -> None:
    think = ThinkTokens.of(tokenizer)
    (space,) = tokenizer.encode("\n", add_special_tokens=False).ids
    read: list[int] = []

    class Counting(list[int]):
        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            read.append(len(found))
            return found

    for num_spaces, is_thinking in ((0, True), (3, True), (100_000, False)):
        text = OutputText(table, think, OutputOptions())
        text.read_prompt(Counting([think.start or 0, *[space] * num_spaces]))
        assert text.is_thinking == is_thinking
    assert max(read) <= output_text.MAX_SPACES


def test_log_probabilities_of_a_prompt_are_read_as_they_are_needed() -> None:
    draw = random.Random(0)
    values = np.array([draw.random() for _ in range(50)], np.float32)
    top_ids, top = np.arange(150, dtype=np.int32), np.repeat(values, 3)
    found = PromptLogprobs(1, 3, values.tobytes(), top_ids.tobytes(), top.tobytes())
    entries = list(of_prompt(list(range(51)), found))
    assert entries[0] == (0, None, [])
    assert [(entry[0], entry[1]) for entry in entries[1:]] == [(i + 1, float(value)) for i, value in enumerate(values)]
    assert entries[50][2] == [(147 + i, float(values[49])) for i in range(3)]
    assert all(type(number) in (int, float) for _, _, likely in entries for pair in likely for number in pair)
