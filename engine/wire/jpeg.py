"""Selection of the JPEGs that a GPU decoder decodes like Pillow, from the header alone.

    SOI  segments (marker, length, payload) ...  SOF0 ...  SOS  entropy-coded data ...  EOI

Marker codes and segment layouts are those of ITU-T T.81, annex B.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SOF0, DHT, SOI, SOS, DQT, DRI, APP0, APP1, APP14, APP15, COM = 0xC0, 0xC4, 0xD8, 0xDA, 0xDB, 0xDD, 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
END_OF_IMAGE = b"\xff\xd9"
MAX_SCANS = 128  # encoders write about ten; each costs a pass over all pixels
MAX_SEGMENTS = 4096  # a colour profile may have 255
FILL_BYTES = re.compile(rb"\xff*")
MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")  # neither a stuffed zero nor a restart marker
SAMPLINGS = frozenset({0x11, 0x21, 0x22})  # of the luminance: 4:4:4, 4:2:2, 4:2:0
RGB_COMPONENTS = (ord("R"), ord("G"), ord("B"))
YCC_TRANSFORM = 1


@dataclass(frozen=True, slots=True)
class PlainJpeg:
    """An 8-bit baseline JPEG with common sampling, one scan and an end marker. Sizes are as stored, before rotation."""

    height: int
    width: int
    has_metadata: bool  # EXIF or XMP, which may contain an orientation


@dataclass(slots=True)
class _Header:
    """Header as parsed so far. `frame`: payload of SOF0."""

    frame: bytes = b""
    quantization: set[int] = field(default_factory=set)
    huffman: set[int] = field(default_factory=set)  # class << 4 | index
    transform: int | None = None  # from Adobe's APP14 segment
    has_metadata: bool = False


def is_jpeg(data: memoryview) -> bool:
    return bytes(data[:3]) == b"\xff\xd8\xff"


def has_end(data: memoryview) -> bool:
    """Return whether an EOI marker follows the start of the scan; metadata after it are tolerated."""
    if bytes(data[-2:]) == END_OF_IMAGE:
        return True
    position = 2
    for marker, payload in _segments(data):
        position += 4 + len(payload)
        if marker == SOS:
            return bytes(data[position:]).find(END_OF_IMAGE) >= 0
    return False


def has_too_many_scans(data: memoryview) -> bool:
    """Return whether a decoder would read more than MAX_SCANS scans, or MAX_SEGMENTS segments, before the image's end."""
    position, num_scans = 2, 0
    for _ in range(MAX_SEGMENTS):
        found = MARKER.search(data, position)
        if found is None or found[1] == END_OF_IMAGE[1:]:
            return False
        num_scans += found[1][0] == SOS
        if num_scans > MAX_SCANS:
            return True
        length = data[found.end() : found.end() + 2]
        position = found.end() + max(2, int.from_bytes(length))
    return True


def parse_plain_jpeg(data: memoryview) -> PlainJpeg | None:
    """Parse a JPEG; return None if Pillow has to decode it."""
    if bytes(data[-2:]) != END_OF_IMAGE:
        return None
    header = _Header()
    for marker, payload in _segments(data):
        if marker == SOS:
            return _describe(header, bytes(payload))
        if not _note(header, marker, bytes(payload)):
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
        length = data[position + 2] << 8 | data[position + 3]
        end = position + 2 + length
        if length < 2 or end > len(data):
            return
        yield marker, data[position + 4 : end]
        position, num_left = end, num_left - 1


def _note(header: _Header, marker: int, payload: bytes) -> bool:
    """Record a segment. Return False if the file is not plain."""
    if marker == SOF0:
        is_first = not header.frame
        header.frame = payload
        return is_first
    if marker == DQT:
        return _note_quantization(header, payload)
    if marker == DHT:
        return _note_huffman(header, payload)
    if marker == APP14 and payload.startswith(b"Adobe") and len(payload) >= 12:
        header.transform = payload[11]
    header.has_metadata |= marker == APP1
    return marker in (DRI, COM) or APP0 <= marker <= APP15  # excludes other frame types, DNL and arithmetic coding


def _note_quantization(header: _Header, payload: bytes) -> bool:
    position = 0
    while position < len(payload):
        if payload[position] > 3:  # 16-bit tables are not baseline; four tables exist
            return False
        header.quantization.add(payload[position])
        position += 65
    return position == len(payload)


def _note_huffman(header: _Header, payload: bytes) -> bool:
    position = 0
    while position + 17 <= len(payload):
        table = payload[position]
        if table & 0xEE:  # class 0 or 1, index 0 or 1 in baseline
            return False
        header.huffman.add(table)
        position += 17 + sum(payload[position + 1 : position + 17])
    return position == len(payload)


def _describe(header: _Header, scan: bytes) -> PlainJpeg | None:
    frame = header.frame
    if len(frame) < 6 or frame[0] != 8 or frame[5] not in (1, 3) or len(frame) != 6 + 3 * frame[5]:
        return None
    height, width = frame[1] << 8 | frame[2], frame[3] << 8 | frame[4]
    if height == 0 or width == 0 or not _has_common_components(header) or not _has_whole_scan(header, scan):
        return None
    return PlainJpeg(height, width, header.has_metadata)


def _has_common_components(header: _Header) -> bool:
    frame = header.frame
    components = [tuple(frame[i : i + 3]) for i in range(6, len(frame), 3)]
    if any(table not in header.quantization for _, _, table in components):
        return False
    if len(components) == 1:
        return components[0][1] == 0x11
    if header.transform not in (None, YCC_TRANSFORM):
        return False
    identifiers = tuple(identifier for identifier, _, _ in components)
    if identifiers == RGB_COMPONENTS or len(set(identifiers)) < 3:
        return False
    return components[0][1] in SAMPLINGS and components[1][1] == components[2][1] == 0x11


def _has_whole_scan(header: _Header, scan: bytes) -> bool:
    """Return whether the first scan has all components, sequentially, with tables that are defined."""
    num_components = header.frame[5]
    if len(scan) != 4 + 2 * num_components or scan[0] != num_components or scan[-3:] != b"\x00\x3f\x00":
        return False
    for i in range(num_components):
        selector, tables = scan[1 + 2 * i], scan[2 + 2 * i]
        if selector != header.frame[6 + 3 * i] or not {tables >> 4, 0x10 | tables & 15} <= header.huffman:
            return False
    return True
