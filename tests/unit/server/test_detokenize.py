"""The detokeniser: pieces add up to what the tokenizer decodes; stop strings are found across tokens and never shown."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from server.processor.detokenize import Detokenizer, StopMatcher, TokenTable


def pieces_of(table: TokenTable, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(table)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def test_pieces_add_up_and_no_character_is_split(tokenizer: Tokenizer, table: TokenTable) -> None:
    """Red if a multi-byte character is shown before it is whole, or lost, or if a token's text is held back without need."""
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
    """Red if streaming finds another end than the first place at which any stop string is complete."""
    shown, is_stopped = run(stops, pieces)
    ends = [("".join(pieces[: i + 1])) for i in range(len(pieces))]
    first = next((text for text in ends if any(stop in text for stop in stops)), None)
    if first is None:
        assert ("".join(shown), is_stopped) == ("".join(pieces), False)
    else:
        assert ("".join(shown), is_stopped) == (first[: min(first.find(stop) for stop in stops if stop in first)], True)
