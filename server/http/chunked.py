"""Decoder of request bodies with `Transfer-Encoding: chunked` (RFC 9112, section 7.1)."""

import re

from server.errors import RequestError

MAX_LINE_BYTES = 1 << 12  # limit of a chunk's size line with extensions, and of a trailer
MAX_TRAILER_BYTES = 1 << 16  # limit of all trailers
SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[^\r\n]{0,4000})?\r\n")


class ChunkedDecoder:
    """Decoder of one body. Every byte is examined once, however the body is split into chunks and reads. Chunk extensions and trailers are
    discarded: a trailer never becomes a header."""

    def __init__(self) -> None:
        self.is_complete = False
        self._left = 0  # payload bytes of the current chunk that have not arrived
        self._line = bytearray()  # incomplete framing bytes
        self._is_in_chunk = False  # the next line ends a chunk
        self._is_in_trailers = False
        self._num_trailer_bytes = 0

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """Return the payload in `data` and the number of bytes that belong to the body. RequestError 400 or 431."""
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
            elif not (self._line or self._is_in_chunk or self._is_in_trailers) and (line := SIZE.match(data, position)):
                self._begin_chunk(int(line[1], 16))
                position = line.end()
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
            raise _too_large()
        return end

    def _take_line(self, line: bytes) -> None:
        is_empty = line == b"\r\n"
        if self._is_in_trailers and line.endswith(b"\r\n"):
            self.is_complete = is_empty
            self._num_trailer_bytes += len(line)
            if self._num_trailer_bytes > MAX_TRAILER_BYTES:
                raise _too_large()
        elif self._is_in_chunk and is_empty:
            self._is_in_chunk = False
        elif self._is_in_trailers or self._is_in_chunk or not (match := SIZE.fullmatch(line)):
            raise RequestError(400, "The request's chunks are malformed.")
        else:
            self._begin_chunk(int(match[1], 16))

    def _begin_chunk(self, size: int) -> None:
        self._left, self._is_in_chunk, self._is_in_trailers = size, size > 0, size == 0


def _too_large() -> RequestError:
    return RequestError(431, "The trailers or an extension of a chunk are too large.")
