"""Takes the images out of a request body while it arrives: a body of 60 MB never becomes a Python string.

    {"url": "data:image/png;base64,iVBOR..."}   ->   {"url": "<nonce>:0"}  +  Reference(offset, length, ...) into the body

A base64 `data:` string is swapped wherever it stands as a JSON string, and so is the value of a key `data` that begins like MIN_BARE
characters of base64: `{"data": "iVBOR..."}`, as one dialect has it. The schemas honour a reference where an image may be and ask
for every other one to be put back (`restored`). A client cannot know the nonce, so it can neither forge a reference nor lose a text.
"""

import re
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from server.errors import RequestError

OPENING = b'"data'
MAX_OPENING_BYTES = 272  # maximum length of a media type with parameters
MIN_BARE = 200  # characters; a shorter payload stays in the JSON
STRING_REST = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # ends at the closing quote, or at a last backslash
HEADER = re.compile(rb'"data:((?:[^"\\,]|\\/)*);base64,')
BARE = re.compile(rb'"data"[ \t\r\n]{0,16}:[ \t\r\n]{0,16}(?="[A-Za-z0-9+/_\\-]{%d})' % MIN_BARE)  # up to the quote of the value
UNDECIDED = re.compile(rb'"data(?::[^",]*|"[ \t\r\n]{0,16}(?::[ \t\r\n]{0,16}(?:"[A-Za-z0-9+/_\\-]*)?)?)?')


@dataclass(slots=True)
class Reference:
    """One payload: base64 text as in the JSON string, including escapes, at `offset` of the body."""

    mime: str
    offset: int
    length: int
    opening: bytes  # the string before the payload, including the quote


class Scanner:
    """Incremental scanner: `feed` every chunk, then call `json`. The time is linear in the bytes fed, however they are split. The caller
    keeps the body.

    Invariant: `_in_string` and `_escaped` describe the position after the last processed byte; `_held` follows it, not yet processed."""

    def __init__(self, nonce: str, max_references: int):
        self.references: list[Reference] = []
        self.used: set[int] = set()  # indices of those that the request has as media
        self.num_text_bytes = 0  # size of the JSON without payloads
        self._num_fed = 0
        self.prefix = f"{nonce}:"  # prefix of references
        self._max_references = max_references
        self._pieces: list[bytes] = []
        self._held = b""
        self._in_string = False
        self._escaped = False
        self._in_payload = False

    def feed(self, chunk: bytes) -> None:
        data = self._held + chunk if self._held else chunk
        self._held = b""
        self._num_fed += len(chunk)
        position = 0
        while position < len(data):
            position = self._skip_payload(data, position) if self._in_payload else self._scan_text(data, position)

    @property
    def num_complete(self) -> int:
        return len(self.references) - self._in_payload

    def index_of(self, text: str) -> int | None:
        return int(text[len(self.prefix) :]) if text.startswith(self.prefix) else None

    def json(self) -> bytes:
        return b"".join((*self._pieces, self._held))

    def restored(self, value: Any, body: memoryview) -> Any:
        """Return the parsed JSON with the original strings instead of references that are not used. RequestError 400."""
        if isinstance(value, dict):
            return {self.restored(key, body): self.restored(inner, body) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.restored(inner, body) for inner in value]
        index = self.index_of(value) if isinstance(value, str) else None
        if index is None or index in self.used:
            return value
        reference = self.references[index]
        try:
            return from_json(reference.opening + bytes(body[reference.offset : reference.offset + reference.length]) + b'"')
        except ValueError:
            raise RequestError(400, "The request body is not valid JSON.") from None

    def _scan_text(self, data: bytes, start: int) -> int:
        """Scan up to the first payload or the end. Return where to continue."""
        synced = search = start
        while len(self.references) < self._max_references and (found := data.find(OPENING, search)) >= 0:
            self._advance(data[synced:found])
            synced, search = found, found + 1
            if self._in_string:
                continue  # the quote is escaped or closes a string
            header = HEADER.match(data, found, found + MAX_OPENING_BYTES)
            if header:
                mime = header[1].split(b";")[0].replace(b"\\/", b"/").decode("latin-1")
                return self._open(data, start, found, header.end(), mime)
            bare = BARE.match(data, found, found + MAX_OPENING_BYTES)
            if bare:
                return self._open(data, start, bare.end(), bare.end() + 1, "")
            if _is_undecided(data, found):
                self._emit(data[start:found])
                self._held = data[found:]
                return len(data)
        end = len(data) - _overlap(data)
        self._advance(data[synced:end])
        self._emit(data[start:end])
        self._held = data[end:]
        return len(data)

    def _emit(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.num_text_bytes += len(piece)

    def _open(self, data: bytes, start: int, quote: int, payload: int, mime: str) -> int:
        """Begin a payload in the string that `quote` opens. Return where it begins."""
        self._emit(data[start:quote])
        offset = self._num_fed - len(data) + payload
        self.references.append(Reference(mime, offset, 0, data[quote:payload]))
        self._emit(f'"{self.prefix}{len(self.references) - 1}'.encode())
        self._in_payload = True
        return payload

    def _skip_payload(self, data: bytes, start: int) -> int:
        """Skip up to the closing quote, which is text again, or to the end. Return where to continue."""
        end = self._find_closing_quote(data, start)
        self.references[-1].length += (len(data) if end is None else end) - start
        if end is None:
            return len(data)
        self._in_payload = self._escaped = False
        self._in_string = True
        return end

    def _find_closing_quote(self, data: bytes, start: int) -> int | None:
        """Return the closing quote of the string that contains `start`, or None if it is not in these bytes."""
        end = data.find(b'"', start)
        if not self._escaped and data.find(b"\\", start, end if end >= 0 else len(data)) < 0:
            return end if end >= 0 else None
        first = start + self._escaped
        match = STRING_REST.match(data, first)
        end = match.end() if match else first  # there is always a match
        self._escaped = data[end : end + 1] == b"\\"
        return end if data[end : end + 1] == b'"' else None

    def _advance(self, data: bytes) -> None:
        """Update the string state over text: a quote toggles it unless it is escaped by a backslash."""
        if self._escaped and data:
            data = data[1:]
            self._escaped = False
        num_quotes = data.count(b'"')
        if b"\\" in data:
            unpaired = data.replace(b"\\\\", b"")
            num_quotes -= unpaired.count(b'\\"')
            self._escaped = unpaired.endswith(b"\\")
        self._in_string ^= bool(num_quotes & 1)


def _is_undecided(data: bytes, found: int) -> bool:
    """Return whether further bytes may make the string at `found`, or the value after it, a payload."""
    opening = data[found : found + MAX_OPENING_BYTES]
    return len(opening) < MAX_OPENING_BYTES and UNDECIDED.fullmatch(opening) is not None


def _overlap(data: bytes) -> int:
    """Return how many bytes at the end may start OPENING."""
    return next((n for n in range(len(OPENING) - 1, 0, -1) if data.endswith(OPENING[:n])), 0)
