"""Text of an answer: token ids become whole UTF-8 characters without special tokens, one by one, are cut at stop strings, and divided into
reasoning, content and tool calls. The cost per token does not depend on the number of previous tokens.

    prompt ends in <think> ────┐
    first token is <think> ────┴──▶ reasoning ── </think> ──┐
    neither ────────────────────────────────────────────────┴──▶ content
                                        calls are taken out of both: `calls.py`

Token ids, never text, decide what is reasoning; neither marker is shown.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders

from engine.wire.messages import CallDelta
from engine.wire.params import OutputOptions
from server.processor.text.calls import CallSplitter, Schemas, possible_start

NUM_AT_ONCE = 1 << 14  # ids
LINE_BREAKS = "\r\n"
MAX_SPACES = 256  # tokens of white space after a prompt's `<think>`

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def byte_alphabet() -> dict[int, int]:
    """Return the alphabet of byte-level BPE (GPT-2): printable bytes are themselves, others are characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


class TokenTable:
    """Bytes of every token, and its text if it is whole UTF-8, else None. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer):
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise ValueError("only tokenizers of the byte-level kind are supported")
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        size = 1 + max(vocabulary.values())
        alphabet = byte_alphabet()
        self.bytes: list[bytes] = [b""] * size  # ids without a token have no text
        self.specials = {token_id: token.content for token_id, token in added.items() if token.special}
        for token, token_id in vocabulary.items():
            if token_id in added:
                self.bytes[token_id] = b"" if added[token_id].special else token.encode()
            else:
                self.bytes[token_id] = token.translate(alphabet).encode("latin-1")
        self.texts = [_decode_whole(data) for data in self.bytes]

    def spelling(self, token_id: int) -> bytes:
        special = self.specials.get(token_id)
        return special.encode() if special is not None else self.bytes[token_id] if token_id < len(self.bytes) else b""

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, including special tokens."""
        decoder = _new_utf8_decoder("replace")
        pieces = [decoder.decode(b"".join(map(self.spelling, ids[i : i + NUM_AT_ONCE]))) for i in range(0, len(ids), NUM_AT_ONCE)]
        return "".join((*pieces, decoder.decode(b"", final=True)))


def _decode_whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class Detokenizer:
    """The joined results of `push` and `flush` equal the tokenizer's decoding of all ids."""

    def __init__(self, table: TokenTable, skip_special_tokens: bool = True):
        self._table = table
        self._specials = {} if skip_special_tokens else table.specials
        self._decoder = _new_utf8_decoder("replace")
        self.is_between = True  # the text does not end inside a character

    def push(self, token_id: int) -> str:
        table = self._table
        if token_id >= len(table.texts):
            return ""
        text = table.texts[token_id]
        if text is not None and self.is_between:
            return self._specials.get(token_id, text) if self._specials else text
        text = self._decoder.decode(table.bytes[token_id])
        self.is_between = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """Return the rest: an incomplete character becomes U+FFFD."""
        return "" if self.is_between else self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds stop strings in pieces of text. Only text that may begin a stop string is held back."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        self.found: str | None = None
        self.is_armed = True  # otherwise text is not searched
        self._stops, self._include_stop = stops, include_stop
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Return the text to show and whether a stop string was found."""
        if not (self._stops and self.is_armed):
            return piece, False
        text = self._held + piece
        if found := [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]:
            self._held, (start, self.found) = "", min(found)
            return text[: start + len(self.found) * self._include_stop], True
        keep = min(possible_start(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


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
