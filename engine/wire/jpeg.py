"""Selection of the JPEGs that a GPU decoder decodes like Pillow, from the header alone.

    SOI  segments (marker, length, payload) ...  SOF0 ...  SOS  entropy-coded data ...  EOI

Marker codes and segment layouts are those of ITU-T T.81, annex B.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SOF0, DHT, SOS, DQT, DRI, APP0, APP1, APP14, APP15, COM = 0xC0, 0xC4, 0xDA, 0xDB, 0xDD, 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
START, END_OF_IMAGE = b"\xff\xd8\xff", b"\xff\xd9"
MAX_SEGMENTS = 4096  # a colour profile may have 255
FILL_BYTES = re.compile(rb"\xff*")
QUANTIZATION_BYTES = 65
QUANTIZATION_TABLES = frozenset(range(4))  # of 8 bits, as in baseline
HUFFMAN_TABLES = frozenset({0x00, 0x01, 0x10, 0x11})  # class << 4 | index, as in baseline
SAMPLINGS = frozenset({0x11, 0x21, 0x22})  # of the luminance: 4:4:4, 4:2:2, 4:2:0
RGB_COMPONENTS = b"RGB"
YCC_TRANSFORM = 1


@dataclass(frozen=True, slots=True)
class PlainJpeg:
    """An 8-bit baseline JPEG with common sampling, one scan and an end marker. Sizes are as stored, before rotation."""

    height: int
    width: int
    has_metadata: bool  # EXIF or XMP, which may contain an orientation


@dataclass(slots=True)
class _Header:
    frame: bytes = b""  # payload of SOF0
    quantization: set[int] = field(default_factory=set)
    huffman: set[int] = field(default_factory=set)
    transform: int | None = None  # from Adobe's APP14 segment
    has_metadata: bool = False


def parse_plain_jpeg(data: memoryview) -> PlainJpeg | None:
    """Parse a JPEG; return None if Pillow has to decode it, or for another file."""
    if bytes(data[:3]) != START or bytes(data[-2:]) != END_OF_IMAGE:
        return None
    header = _Header()
    for marker, segment in _segments(data):
        payload = bytes(segment)
        if marker == SOS:
            size = header.frame[1:5]
            is_plain = _is_plain(header) and _is_whole(header, payload)
            return PlainJpeg(int.from_bytes(size[:2]), int.from_bytes(size[2:]), header.has_metadata) if is_plain else None
        if not _note(header, marker, payload):
            return None
    return None


def _segments(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (marker, payload) up to SOS, MAX_SEGMENTS, or an invalid structure."""
    position, num_left = 2, MAX_SEGMENTS
    while num_left and position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # fill bytes before a marker
            run = FILL_BYTES.match(data, position)
            assert run is not None
            position = run.end() - 1
            continue
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4])
        if end < position + 4 or end > len(data):
            return
        yield marker, data[position + 4 : end]
        position, num_left = end, num_left - 1


def _note(header: _Header, marker: int, payload: bytes) -> bool:
    """Record a segment. Return False if the file is not plain."""
    position = 0
    if marker == SOF0:
        is_first, header.frame = not header.frame, payload
        return is_first
    while marker in (DQT, DHT) and position + 17 <= len(payload):  # several tables in a segment
        (header.quantization if marker == DQT else header.huffman).add(payload[position])
        position += QUANTIZATION_BYTES if marker == DQT else 17 + sum(payload[position + 1 : position + 17])
    if marker == APP14 and payload.startswith(b"Adobe") and len(payload) >= 12:
        header.transform = payload[11]
    header.has_metadata |= marker == APP1
    return marker in (DQT, DHT, DRI, COM) or APP0 <= marker <= APP15  # excludes other frame types, DNL and arithmetic coding


def _is_plain(header: _Header) -> bool:
    frame = header.frame
    if len(frame) < 6 or frame[0] != 8 or frame[5] not in (1, 3) or len(frame) != 6 + 3 * frame[5]:
        return False
    if not (any(frame[1:3]) and any(frame[3:5])):  # height and width
        return False
    identifiers, samplings, tables = frame[6::3], frame[7::3], frame[8::3]
    if not {*tables} <= header.quantization <= QUANTIZATION_TABLES or not header.huffman <= HUFFMAN_TABLES:
        return False
    if len(identifiers) == 1:
        return samplings[0] == 0x11
    if header.transform not in (None, YCC_TRANSFORM) or identifiers == RGB_COMPONENTS or len({*identifiers}) < 3:
        return False
    return samplings[0] in SAMPLINGS and samplings[1] == samplings[2] == 0x11


def _is_whole(header: _Header, scan: bytes) -> bool:
    """Return whether the first scan has all components, sequentially, with tables that are defined."""
    identifiers, tables = header.frame[6::3], scan[2:-3:2]
    if scan[:1] != header.frame[5:6] or scan[1:-3:2] != identifiers or len(tables) != len(identifiers) or scan[-3:] != b"\x00\x3f\x00":
        return False
    return all({table >> 4, 0x10 | table & 15} <= header.huffman for table in tables)
