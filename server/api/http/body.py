"""Reader of a request body into the api's arena. Space is reserved before the first byte is read; the processor learns of each image of a
large body as soon as it is complete."""

import contextlib
import secrets
import time

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from engine.wire.arena import Arena, ArenaFull, ArenaTooSmall, GrowingRegion
from engine.wire.config import EngineConfig
from engine.wire.messages import API_ARENA, Region
from server.api.http.registry import RequestRegistry
from server.api.http.scan import Scanner
from server.errors import RequestError, overloaded

FIRST_CAPACITY = 1 << 16  # reserved for a body without a Content-Length
MAX_SPARE_REFERENCES = 1024  # so that requests with slightly too many images get the right error
MAX_TEXT_BYTES = 8 << 20  # limit of JSON without media: several times the largest context


class Body:
    """A body being received: the bytes in `region`, the JSON without payloads in `scanner`. The owner passes the region on or calls
    `give_up`."""

    def __init__(self, region: GrowingRegion, scanner: Scanner, registry: RequestRegistry, started: float):
        self.region = region
        self.scanner = scanner
        self.started = started  # when the first byte was requested
        self.received = 0.0  # when the last byte arrived
        self.new_rid = registry.new_rid
        self.rid = registry.new_rid()
        self.credentials = b""  # the client's Authorization header or key
        self.seed = 0  # for its requests without a seed
        self.num_announced = 0  # images that the processor knows; from the first one on it may read the region
        self._registry = registry

    @property
    def payloads(self) -> memoryview:
        return self.region.view

    def announce(self, limit: int) -> None:
        """Start decoding complete images, at most `limit` in total. The region must not move after this."""
        complete = self.scanner.references[self.num_announced : min(limit, self.scanner.num_complete)]
        for reference in complete:
            if reference.mime.lower().startswith(("image/", "application/")) or not reference.mime:
                self._registry.announce(self.rid, Region(API_ARENA, self.region.offset + reference.offset, reference.length))
        self.num_announced += len(complete)

    def give_up(self) -> None:
        if self.num_announced:
            self._registry.abandon(self.rid, self.region.offset)
        else:
            self.region.free()


async def read_body(receive: Receive, length: int | None, arena: Arena, config: EngineConfig, registry: RequestRegistry) -> Body:
    """Read a body. RequestError 413 (exceeds the arena's limit) or 503 (does not fit at present); ClientDisconnect if it is truncated."""
    if length is not None and length > config.max_body_bytes:
        raise _too_large(config.max_body_bytes)
    started = time.monotonic()
    with contextlib.ExitStack() as undo:
        try:
            region = GrowingRegion(arena, FIRST_CAPACITY if length is None else length)
            scanner = Scanner(secrets.token_hex(16), config.max_images_per_request + MAX_SPARE_REFERENCES)
            body = Body(region, scanner, registry, started)
            undo.callback(body.give_up)
            more = True
            while more:
                more = await _receive_piece(receive, region, scanner, config.max_body_bytes)
                if length is not None:  # the region does not grow; the last image need not wait for the JSON to be validated
                    body.announce(config.max_images_per_request)
        except ArenaTooSmall:
            raise _too_large(arena.size) from None
        except ArenaFull:
            raise overloaded("The server holds too many request bodies right now.") from None
        region.trim()
        undo.pop_all()
    body.received = time.monotonic()
    return body


async def _receive_piece(receive: Receive, region: GrowingRegion, scanner: Scanner, max_bytes: int) -> bool:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    chunk: bytes = message.get("body", b"")
    if region.used + len(chunk) > max_bytes:
        raise _too_large(max_bytes)
    region.append(chunk)
    scanner.feed(chunk)
    check_text_bytes(scanner.num_text_bytes)
    more: bool = message.get("more_body", False)
    return more


def check_text_bytes(num_bytes: int) -> None:
    """Raise RequestError 413 if the JSON without media exceeds MAX_TEXT_BYTES."""
    if num_bytes > MAX_TEXT_BYTES:
        raise RequestError(413, f"The request holds more than {MAX_TEXT_BYTES >> 20} MiB besides its images.")


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"The request body exceeds the limit of {limit} bytes.")
