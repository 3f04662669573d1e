"""What goes over the pipes between the compiler process and who asks it: frames of 4 bytes of length and as many bytes."""

from typing import BinaryIO

import msgspec

LENGTH_BYTES = 4


class Compiled(msgspec.Struct, frozen=True):
    """A compiled grammar as xgrammar serialises it, or why there is none."""

    data: bytes = b""
    error: str | None = None


def frame_of(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def write_frame(stream: BinaryIO, data: bytes) -> None:
    stream.write(frame_of(data))
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, or None at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(head, "little")) if len(head) == LENGTH_BYTES else None
