"""The text of an answer in its two parts: what a model thinks, then what it says. Called by `server/processor/output.py` for every token.

    prompt ends in <think> ────┐
    first token is <think> ────┴──▶ reasoning ── </think> ──┐
    neither ────────────────────────────────────────────────┴──▶ content

Token ids decide, never text, and neither marker is shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from server.processor.detokenize import Detokenizer, StopMatcher, TokenTable

LINE_BREAKS = "\r\n"


@dataclass(frozen=True, slots=True)
class ThinkTokens:
    """The ids of `<think>` and `</think>`. None, which is no token's id, if the tokenizer lacks either."""

    start: int | None
    end: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ThinkTokens":
        start, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
        return cls(None, None) if start is None or end is None else cls(start, end)


class OutputText:
    """The text of one request. Every token belongs to one part; stop strings are found in both, but never across their boundary."""

    def __init__(self, table: TokenTable, think: ThinkTokens, stops: Sequence[str]):
        self.is_reasoning = False  # the last token was part of the thoughts, or one of their markers
        self._table = table
        self._think = think
        self._detokenizer = Detokenizer(table)
        self._stops = StopMatcher(stops)
        self._is_open = False  # the next token is part of the thoughts
        self._is_first = True
        self._is_behind_marker = False  # line breaks are not shown

    def read_prompt(self, ids: Sequence[int]) -> None:
        """The output begins with thoughts if only white space follows the prompt's last `<think>`: then it is the template's own.

        One that a client typed has at least the end of its message behind it.
        """
        texts = self._table.texts
        last = next((token_id for token_id in reversed(ids) if not (texts[token_id] or "").isspace()), -1)
        self._is_open = last == self._think.start

    def push(self, token_id: int, is_hidden: bool = False) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was found. A hidden token has no text."""
        is_first, self._is_first = self._is_first, False
        self.is_reasoning = self._is_open
        if self._is_open and token_id == self._think.end:
            self._is_open = False
            self._is_behind_marker = True
            return self.flush()
        if is_first and token_id == self._think.start:
            self._is_open = self.is_reasoning = self._is_behind_marker = True
            return "", False
        text = "" if is_hidden else self._detokenizer.push(token_id)
        if self._is_behind_marker:
            text = text.lstrip(LINE_BREAKS)
            self._is_behind_marker = not text
        return self._stops.push(text)

    def flush(self) -> tuple[str, bool]:
        """At the end of a part: what was held back, and whether it completes a stop string."""
        text, is_stopped = self._stops.push(self._detokenizer.flush())
        return (text, True) if is_stopped else (text + self._stops.flush(), False)
