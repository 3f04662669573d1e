"""Conversion of token ids to text, one by one: whole UTF-8 characters, without special tokens, cut at stop strings.

The cost per token does not depend on the number of previous tokens."""

import codecs
import functools
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders

NUM_AT_ONCE = 1 << 14  # ids

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
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        self._matched = [0] * len(stops)  # characters of each stop string at the end of the text

    def push(self, piece: str) -> tuple[str, bool]:
        """Return the text to show and whether a stop string was found."""
        if not (self._stops and self.is_armed):
            return piece, False
        text = self._held + piece
        found = [(end - len(stop), stop) for i, (stop, _) in enumerate(self._stops) if (end := self._find(i, text))]
        if found:
            self._held, self._matched = "", [0] * len(self._stops)
            start, self.found = min(found)
            return text[: start + len(self.found) * self._include_stop], True
        keep = len(text) - max(self._matched)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _find(self, index: int, text: str) -> int:
        """Return the end of stop string `index` in the text, or 0. Held text was searched before. Algorithm of Knuth, Morris and Pratt."""
        (stop, borders), matched, start = self._stops[index], self._matched[index], len(self._held)
        if not matched:
            start = text.find(stop[0], start)
            start = len(text) if start < 0 else start
        for i in range(start, len(text)):
            while matched and stop[matched] != text[i]:
                matched = borders[matched - 1]
            matched += stop[matched] == text[i]
            if matched == len(stop):
                return i + 1
        self._matched[index] = matched
        return 0


@functools.lru_cache(maxsize=64)
def _borders(stop: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper suffix that is a prefix."""
    borders, length = [0], 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = borders[length - 1]
        length += stop[length] == char
        borders.append(length)
    return borders


def possible_start(text: str, marker: str) -> int:
    """Return the start of the longest suffix of `text` that begins `marker`, or the text's length."""
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0:
        if marker.startswith(text[start:]):
            return start
        start = text.find(marker[0], start + 1)
    return len(text)
