"""What followed the last tokens, wherever they stood before: a suffix automaton of texts of token ids, and a reader's place in it.

All substrings that end at the same places are one state; its link is the longest of their suffixes that also ends elsewhere. A text of n
tokens has at most 2n states. Adding a token takes about 3 us, a guess of 7 tokens 6 us; a token takes 70 to 250 bytes.
"""

from array import array
from collections.abc import Iterable

MATCH = 24  # tokens of the longest context
COUNTED = MATCH + 1  # occurrences are counted of strings of so many tokens and fewer: of a context and what follows
MAX_BRANCHES = 64  # what is followed by more different tokens is no guide
MIN_PATH = 0.05  # probability of all tokens of a guess

Guess = list[tuple[int, float]]  # tokens, each with the probability that it follows the one before


class SuffixAutomaton:
    """Texts, one behind the other. Nothing matches across the end of a text. It only grows."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._length = array("i", [0])  # of each state's longest string; state 0 is the empty one
        self._link = array("i", [-1])
        self._count = array("i", [0])  # occurrences of its strings, if some have at most COUNTED tokens
        self._token = array("i", [-1])  # of the first transition, -1: none
        self._target = array("i", [-1])
        self._more: dict[int, dict[int, int]] = {}  # other transitions
        self._last = 0  # state of the whole text so far
        self._end, self._end_length = 0, 0  # of its last COUNTED tokens

    def extend(self, tokens: Iterable[int]) -> None:
        """More of the current text."""
        for token in tokens:
            self._add(token)
            self._count_end(token)

    def end_text(self) -> None:
        self._last = self._end = self._end_length = 0

    def guess(self, most: int) -> tuple[int, Guess]:
        """What follows the text so far, as it did before: as `follow`."""
        return self.follow(self._end, self._end_length, most)

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The state and length of the longest string, of at most MATCH tokens, that ends the `length` tokens of `state` and `token`."""
        state = self._cut(state, min(length, MATCH - 1))
        length = min(length, MATCH - 1)
        while (target := self._next(state, token)) < 0:
            if state == 0:
                return 0, 0
            state = self._link[state]
            length = self._length[state]
        return target, length + 1

    def follow(self, state: int, length: int, most: int) -> tuple[int, Guess]:
        """How many of the tokens up to here, at most MATCH, stood somewhere and were followed by another; and at most `most` tokens: again
        and again the most frequent one behind the last MATCH. A short context that was seen once says little of what will follow it."""
        length = min(length, MATCH)
        state = self._cut(state, length)
        while state and self._token[state] < 0:
            state = self._link[state]
            length = self._length[state]
        guess: Guess = []
        matched, path = length, 1.0
        while state and len(guess) < most:
            token, target, share = self._most_frequent(state, length)
            path *= share
            if token < 0 or path < MIN_PATH:
                break
            guess.append((token, share))
            length = min(length + 1, MATCH)
            state = self._cut(target, length)
        return matched, guess

    def _next(self, state: int, token: int) -> int:
        """-1: none."""
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return -1 if more is None else more.get(token, -1)

    def _cut(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of one of the state's strings: a later text may have split it."""
        links, lengths = self._link, self._length
        while state and lengths[links[state]] >= length:
            state = links[state]
        return state

    def _most_frequent(self, state: int, length: int) -> tuple[int, int, float]:
        """The token behind a string, its state and its probability; -1 if it is anybody's guess."""
        token, target, counts = self._token[state], self._target[state], self._count
        if token < 0:
            return -1, 0, 0.0
        best = total = counts[target]
        more = self._more.get(state)
        if more is not None:
            if len(more) >= MAX_BRANCHES:
                return -1, 0, 0.0
            for other, other_target in more.items():
                count = counts[other_target]
                total += count
                if count > best:
                    token, target, best = other, other_target, count
        return token, target, best / (total + 1 / length)

    def _add(self, token: int) -> None:
        self.num_tokens += 1
        last, lengths, links = self._last, self._length, self._link
        known = self._next(last, token)
        if known >= 0:  # the text begins as another one
            self._last = known if lengths[known] == lengths[last] + 1 else self._split(last, token, known)
            return
        self._last = new = self._new_state(lengths[last] + 1, 0)
        tokens, targets = self._token, self._target
        while last >= 0:
            if tokens[last] < 0:
                tokens[last], targets[last] = token, new
            elif (target := self._next(last, token)) < 0:
                self._more.setdefault(last, {})[token] = new
            else:
                links[new] = target if lengths[target] == lengths[last] + 1 else self._split(last, token, target)
                return
            last = links[last]

    def _new_state(self, length: int, link: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._count.append(0)
        self._token.append(-1)
        self._target.append(-1)
        return len(self._length) - 1

    def _split(self, before: int, token: int, state: int) -> int:
        """A state for those strings of `state` that are no longer than `before` and the token: they end at one more place."""
        new = self._new_state(self._length[before] + 1, self._link[state])
        self._count[new] = self._count[state]
        self._token[new], self._target[new] = self._token[state], self._target[state]
        if (more := self._more.get(state)) is not None:
            self._more[new] = more.copy()
        self._link[state] = new
        while before >= 0 and self._next(before, token) == state:
            if self._token[before] == token:
                self._target[before] = new
            else:
                self._more[before][token] = new
            before = self._link[before]
        return new

    def _count_end(self, token: int) -> None:
        """One more occurrence of the last tokens, one to COUNTED of them."""
        length = min(self._end_length, COUNTED - 1)
        state = self._next(self._cut(self._end, length), token)
        self._end, self._end_length = state, length + 1
        counts, links = self._count, self._link
        while state > 0:
            counts[state] += 1
            state = links[state]


class Reader:
    """Follows a text through an automaton of others."""

    def __init__(self, automaton: SuffixAutomaton):
        self.automaton = automaton
        self._state = self._length = 0

    def read(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._state, self._length = self.automaton.advance(self._state, self._length, token)

    def guess(self, most: int) -> tuple[int, Guess]:
        return self.automaton.follow(self._state, self._length, most)
