"""The suffix automaton against a search of the whole text, and its bounds."""

import random
from array import array
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.drafts.suffixes import COUNTED, MATCH, MAX_BRANCHES, MIN_PATH, Guess, Reader, SuffixAutomaton

Texts = list[list[int]]
words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=4)


def search(texts: Texts, context: list[int], most: int) -> tuple[int, Guess]:
    """What `follow` says, by comparing every place with the context. `context` may be no part of the texts."""
    guess: Guess = []
    matched, path = 0, 1.0
    context = context[-MATCH:]
    while len(guess) < most:
        found: Counter[int] = Counter()
        for length in range(len(context), 0, -1) if not guess else [len(context)]:
            end = context[len(context) - length :]
            places = [(text, i + length) for text in texts for i in range(len(text) - length) if text[i : i + length] == end]
            found = Counter(text[i] for text, i in places)
            if found:
                context = end
                break
        if not found or len(found) > MAX_BRANCHES:
            break
        matched = matched if guess else len(context)
        most_common = max(found.values())
        share = most_common / (found.total() + 1 / len(context))
        path *= share
        if path < MIN_PATH:
            break
        guess.append((-most_common, share))  # of several that are as frequent, any will do
        if list(found.values()).count(most_common) > 1:
            break
        context = [*context, max(found, key=lambda token: found[token])][-MATCH:]
    return matched, guess


def assert_agree(mine: tuple[int, Guess], found: tuple[int, Guess]) -> None:
    assert mine[0] == found[0] or not found[1]
    n = len(found[1])
    assert [round(share, 9) for _, share in mine[1][:n]] == [round(share, 9) for _, share in found[1]]
    assert n or not mine[1]


def made_of(rng: random.Random, pieces: Texts, num_pieces: int) -> list[int]:
    """A text of repeated pieces."""
    return [token for _ in range(num_pieces) for token in rng.choice(pieces)]


@given(pieces=words, seed=st.integers(0, 10**9))
def test_matches_and_shares_are_those_of_a_search(pieces: Texts, seed: int) -> None:
    """Red if a match is not the longest, a count is wrong, or a context reaches across the end of a text; of the text's own end, and of
    a reader's place while texts still come."""
    rng = random.Random(seed)
    automaton, texts = SuffixAutomaton(), [made_of(rng, pieces, rng.randint(1, 12)) for _ in range(rng.randint(1, 4))]
    reader, asked = Reader(automaton), made_of(rng, pieces, 8)
    known: Texts = []
    for text in texts:
        known.append([])
        for token in text:
            automaton.extend([token])
            known[-1].append(token)
            assert_agree(automaton.guess(7), search(known, known[-1], 7))
        automaton.end_text()
        reader.read(asked[3 * len(known) - 3 : 3 * len(known)])
        told = reader.guess(7)  # of what it has read before a text came, it may know less
        assert_agree(told, search(known, asked[: 3 * len(known)][-told[0] :] if told[0] else [], 7))
    late = Reader(automaton)
    for i, token in enumerate(asked):
        late.read([token])
        assert_agree(late.guess(7), search(known, asked[: i + 1], 7))


def test_a_guess_is_the_text_that_came_before() -> None:
    """Red if a copy is not foreseen token by token, or if a single sight of a short context is taken for sure."""
    rng = random.Random(0)
    original = [rng.randrange(1000, 9000) for _ in range(200)]
    automaton = SuffixAutomaton()
    automaton.extend(original + original[:30])
    matched, guess = automaton.guess(7)
    assert matched == MATCH and [token for token, _ in guess] == original[30:37] and guess[0][1] > 0.9
    automaton.end_text()
    automaton.extend(original[50:51])
    assert automaton.guess(7)[1][0][1] == 0.5


class Counted(array):  # type: ignore[type-arg]
    """An array that counts how often an item is read."""

    num_reads = 0

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        self.num_reads += 1
        return int(super().__getitem__(index))


def test_states_and_work_per_token_are_bounded() -> None:
    """Red if a text has more than two states per token, or if the work per token or draft grows with the text.

    Every walk through the automaton reads a link per step: a token has at most COUNTED steps for its counts and amortised a few more.
    """
    rng = random.Random(0)
    for size in (1_000, 4_000):
        page = [rng.randrange(50_000) for _ in range(size // 2)]
        for text in (page + page, [5] * size, [rng.randrange(4) for _ in range(size)], [token for i in page for token in (9, i)]):
            automaton = SuffixAutomaton()
            automaton._link = links = Counted("i", [-1])
            automaton.extend(text)
            assert len(automaton._length) <= 2 * size
            assert links.num_reads <= 2 * COUNTED * size
            automaton.extend(text[:1])  # in the last text, half of all tokens have followed it
            branches = Counted("i", automaton._count)
            automaton._count, links.num_reads = branches, 0
            automaton.guess(7)
            assert links.num_reads <= 8 * 2 * COUNTED and branches.num_reads <= 7 * (MAX_BRANCHES + 1)
