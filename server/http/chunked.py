"""Decoder of request bodies with `Transfer-Encoding: chunked` (RFC 9112, section 7.1)."""

import re

MAX_LINE_BYTES = 1 << 12  # of a chunk's size with its extensions, and of a trailer
SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[^\r\n]*)?\r\n")


class BadChunk(ValueError):
    """The framing is malformed."""


class LineTooLong(ValueError):
    """A size line or a trailer exceeds MAX_LINE_BYTES."""


class ChunkedDecoder:
    """Decoder of one body. Every byte is looked at once, however the body is split into chunks and reads. Chunk extensions and trailers are
    discarded: a trailer never becomes a header."""

    def __init__(self) -> None:
        self.is_complete = False
        self._left = 0  # payload bytes of the current chunk that have not arrived
        self._line = bytearray()  # of the framing, not complete yet
        self._is_in_chunk = False  # the next line ends a chunk
        self._is_in_trailers = False

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """Return the payload in `data` and the number of bytes that belong to the body. BadChunk or LineTooLong."""
        pieces: list[bytes] = []
        position, size = 0, len(data)
        while position < size and not self.is_complete:
            if self._left:
                piece = data[position : position + self._left]
                pieces.append(piece)
                self._left -= len(piece)
                position += len(piece)
            elif self._is_in_chunk and not self._line and data.startswith(b"\r\n", position):
                self._is_in_chunk = False
                position += 2
            else:
                position = self._read_line(data, position)
        return b"".join(pieces), position

    def _read_line(self, data: bytes, start: int) -> int:
        """Read up to the end of a line, or of `data`. Return where to continue."""
        limit = start + MAX_LINE_BYTES - len(self._line)
        newline = data.find(b"\n", start, limit)
        end = newline + 1 or min(limit, len(data))
        self._line += data[start:end]
        if newline >= 0:
            line = bytes(self._line)
            self._line.clear()
            self._take_line(line)
        elif len(self._line) == MAX_LINE_BYTES:
            raise LineTooLong
        return end

    def _take_line(self, line: bytes) -> None:
        is_empty = line == b"\r\n"
        if self._is_in_trailers and line.endswith(b"\r\n"):
            self.is_complete = is_empty
        elif self._is_in_chunk and is_empty:
            self._is_in_chunk = False
        elif self._is_in_trailers or self._is_in_chunk or not (match := SIZE.fullmatch(line)):
            raise BadChunk
        else:
            self._left = int(match[1], 16)
            self._is_in_chunk = self._left > 0
            self._is_in_trailers = not self._left
