"""Conversion of token ids to text, one by one: whole UTF-8 characters, without special tokens, cut at stop strings.

The cost per token does not depend on the number of previous tokens."""

import codecs
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


def possible_start(text: str, marker: str) -> int:
    """Return the start of the longest suffix of `text` that begins `marker`, or the text's length."""
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0:
        if marker.startswith(text[start:]):
            return start
        start = text.find(marker[0], start + 1)
    return len(text)
