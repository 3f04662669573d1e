"""Reads one request body into the api's arena: room is reserved before the first byte is read. Called by `server/chat.py`."""

import asyncio
import contextlib
import secrets
import time

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from engine.arena import Arena, ArenaFull, ArenaTooSmall
from engine.config import EngineConfig
from server.errors import RequestError, overloaded
from server.region import Region
from server.scan import Scanner

FIRST_CAPACITY = 1 << 20  # of a body without a Content-Length
IDLE_TIMEOUT_S = 30.0
MAX_SPARE_REFERENCES = 1024  # so that a few images too many are counted and refused as such
MAX_TEXT_BYTES = 8 << 20  # of the JSON without media: several times what any context holds, and parsed in a few milliseconds


class Body:
    """A body that has arrived: the small JSON in `scanner`, payloads in `region`. The owner frees the region or hands it on."""

    def __init__(self, region: Region, scanner: Scanner, started: float):
        self.region = region
        self.scanner = scanner
        self.started = started  # first byte asked for
        self.received = time.monotonic()  # last byte here

    @property
    def payloads(self) -> memoryview:
        return self.region.view


async def read_body(receive: Receive, content_length: int | None, arena: Arena, config: EngineConfig) -> Body:
    """Reads to the end. RequestError 413 (never fits), 503 (does not fit now), 408 (stalled); ClientDisconnect if it is cut."""
    if content_length is not None and content_length > config.max_body_bytes:
        raise _too_large(config.max_body_bytes)
    started = time.monotonic()
    with contextlib.ExitStack() as undo:
        try:
            region = Region(arena, FIRST_CAPACITY if content_length is None else content_length)
            undo.callback(region.free)
            scanner = await _scan(receive, region, config)
        except ArenaTooSmall:
            raise _too_large(arena.size) from None
        except ArenaFull:
            raise overloaded("The server holds too many request bodies right now.") from None
        region.trim()
        undo.pop_all()
    return Body(region, scanner, started)


async def _scan(receive: Receive, region: Region, config: EngineConfig) -> Scanner:
    scanner = Scanner(secrets.token_hex(16), config.max_images_per_request + MAX_SPARE_REFERENCES)
    num_bytes = 0
    more = True
    while more:
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                message = await receive()
        except TimeoutError:
            raise RequestError(408, f"The request body stalled for {IDLE_TIMEOUT_S:.0f} seconds.") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        num_bytes += len(chunk)
        if num_bytes > config.max_body_bytes:
            raise _too_large(config.max_body_bytes)
        region.reserve(len(chunk))
        scanner.feed(chunk, region.room)
        region.used = scanner.used
        check_text_bytes(scanner.num_text_bytes)
    return scanner


def check_text_bytes(num_bytes: int) -> None:
    """RequestError 413 if this much JSON without media is too much."""
    if num_bytes > MAX_TEXT_BYTES:
        raise RequestError(413, f"The request holds more than {MAX_TEXT_BYTES >> 20} MiB besides its images.")


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"The request body exceeds the limit of {limit} bytes.")
