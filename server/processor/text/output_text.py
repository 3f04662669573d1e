"""Parts of an answer's text: reasoning, content and tool calls.

    prompt ends in <think> ────┐
    first token is <think> ────┴──▶ reasoning ── </think> ──┐
    neither ────────────────────────────────────────────────┴──▶ content
                                        calls are taken out of both: `calls.py`

Token ids, never text, decide what is reasoning; neither marker is shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.wire.messages import CallDelta
from engine.wire.params import OutputOptions
from server.processor.text.calls import CallSplitter, Schemas
from server.processor.text.detokenize import Detokenizer, StopMatcher, TokenTable

LINE_BREAKS = "\r\n"
MAX_SPACES = 256  # tokens of white space after a prompt's `<think>`


@dataclass(frozen=True, slots=True)
class ThinkTokens:
    """Ids of `<think>` and `</think>`; both None if the tokenizer lacks either."""

    start: int | None
    end: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ThinkTokens":
        start, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
        return cls(None, None) if start is None or end is None else cls(start, end)


class OutputText:
    """Text of one answer. Stop strings are found in reasoning and content, but never across their boundary."""

    def __init__(self, table: TokenTable, think: ThinkTokens, options: OutputOptions, schemas: Schemas | None = None):
        self.is_reasoning = False  # the last token was part of the reasoning, or one of its markers
        self.calls: list[CallDelta] = []  # deltas of tool calls from the last token or the end
        self.table = table
        self._think = think
        self._detokenizer = Detokenizer(table, options.skip_special_tokens)
        self._stops = StopMatcher(options.stop, options.include_stop)
        self._num_unstoppable = options.min_tokens  # tokens
        self._splitter = None if options.calls == "none" else CallSplitter(schemas or {}, is_single=options.calls == "one")
        self.is_thinking = False  # the next token is part of the reasoning
        self._is_first = True
        self._is_after_marker = False  # then line breaks are not shown

    @property
    def stop_string(self) -> str | None:
        return self._stops.found

    def read_prompt(self, ids: Sequence[int]) -> None:
        """Set whether the output begins with reasoning: only white space follows the prompt's last `<think>`."""
        texts = self.table.texts  # number of the tokenizer's ids; the model may have more
        tail = reversed(ids[-MAX_SPACES:])
        last = next((token_id for token_id in tail if not (token_id < len(texts) and (texts[token_id] or "").isspace())), -1)
        self.is_thinking = last == self._think.start

    def push(self, token_id: int, is_hidden: bool = False) -> tuple[str, bool]:
        """Return the text to show and whether the answer ends. A hidden token has no text."""
        is_first, self._is_first = self._is_first, False
        self._stops.is_armed = self._num_unstoppable <= 0
        self._num_unstoppable -= 1
        self.is_reasoning = self.is_thinking
        if self.is_thinking and token_id == self._think.end:
            self.is_thinking = False
            self._is_after_marker = True
            text, is_stopped = self._end_part()
            return self._split(text, is_stopped, is_end=self._splitter is not None and not self._splitter.is_inside)
        if is_first and token_id == self._think.start:
            self.is_thinking = self.is_reasoning = self._is_after_marker = True
            return "", False
        text = "" if is_hidden else self._detokenizer.push(token_id)
        if self._is_after_marker:
            text = text.lstrip(LINE_BREAKS)
            self._is_after_marker = not text
        return self._split(*self._stops.push(text))

    def flush(self, is_cut: bool = False) -> tuple[str, bool]:
        """Return held-back text and whether it completes a stop string. `is_cut`: by the token limit."""
        return self._split(*self._end_part(), is_end=True, is_cut=is_cut)

    def _end_part(self) -> tuple[str, bool]:
        text, is_stopped = self._stops.push(self._detokenizer.flush())
        return (text, True) if is_stopped else (text + self._stops.flush(), False)

    def _split(self, text: str, is_stopped: bool, is_end: bool = False, is_cut: bool = False) -> tuple[str, bool]:
        """Extract calls. Only a call may continue from the reasoning into the content."""
        splitter = self._splitter
        if splitter is None:
            return text, is_stopped
        shown, self.calls, is_done = splitter.push(text)
        if is_stopped or is_end:
            rest, calls = splitter.flush(is_cut=is_stopped or is_cut)
            shown, self.calls = shown + rest, self.calls + calls
        return shown, is_stopped or is_done
