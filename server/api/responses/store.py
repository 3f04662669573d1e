"""Answers that a later request may name, kept in memory within a size and an age: `--response-store-bytes`, `--response-store-seconds`.

answer ──▶ Stored(its document, the conversation up to it) ──▶ GET, DELETE /v1/responses/ID
                                                          └──▶ `previous_response_id`: one body of both, read as if it had been sent whole
"""

import asyncio
import contextlib
import hashlib
import re
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from engine.arena import Arena, ArenaFull, ArenaTooSmall
from server.errors import RequestError, overloaded
from server.http.body import Body, check_text_bytes
from server.http.scan import Scanner
from server.http.sse import encode
from server.http.validate import read_object
from server.region import Region

PREVIOUS = "previous_response_id"


@dataclass(frozen=True, slots=True)
class Stored:
    owner: bytes  # digest of the key that asked
    document: bytes
    before: bytes  # JSON of the conversation as of `items_json`
    output: bytes  # the same of the answer
    expires: float

    @property
    def num_bytes(self) -> int:
        return len(self.document) + len(self.before) + len(self.output)


class ResponseStore:
    """The oldest go first."""

    def __init__(self, max_bytes: int, max_seconds: int):
        self.max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self.num_bytes = 0

    def put(self, name: str, owner: bytes, document: bytes, before: bytes, output: bytes) -> None:
        """`before` and `output` are JSON as of `items_json`. What is too large alone is not kept."""
        new = Stored(owner, document, before, output, time.monotonic() + self._max_seconds)
        if new.num_bytes > self.max_bytes:
            return
        self._stored[name] = new
        self.num_bytes += new.num_bytes
        while self.num_bytes > self.max_bytes or next(iter(self._stored.values())).expires < time.monotonic():
            self.num_bytes -= self._stored.popitem(last=False)[1].num_bytes

    def get(self, name: str, owner: bytes, param: str | None = None) -> Stored:
        """RequestError 404, also for one of another key."""
        found = self._stored.get(name)
        if found is None or found.owner != owner or found.expires < time.monotonic():
            words = f"The response '{name[:100]}' is not stored here: never, or no longer. Send the whole conversation as `input`."
            raise RequestError(404, words, param, "response_not_found")
        return found

    def delete(self, name: str, owner: bytes) -> None:
        """RequestError 404."""
        self.num_bytes -= self.get(name, owner).num_bytes
        del self._stored[name]


def owner_of(credentials: bytes) -> bytes:
    return hashlib.sha256(credentials).digest()


def whole(data: bytes, body: Body) -> bytes:
    """JSON with the payloads of this body where its scanner has put references; each is copied once."""
    first, *others = re.split(rb'"%s(\d+)"' % body.scanner.prefix.encode(), data)
    pieces: list[bytes | memoryview] = [first]
    for number, text in zip(others[::2], others[1::2], strict=True):
        reference = body.scanner.references[int(number)]
        pieces += reference.opening, body.payloads[reference.offset : reference.offset + reference.length], b'"', text
    return b"".join(pieces)


def items_json(value: str | list[Any]) -> bytes:
    """Items with commas between; a text is a message."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return encode(items)[1:-1]


async def continued(body: Body, store: ResponseStore, arena: Arena, max_references: int) -> Body:
    """A body of the whole conversation instead of this one, which is given up, if it names an earlier answer. RequestError 404, and as for
    bodies that are too large or no JSON; this one is then still the caller's."""
    data = body.scanner.json(body.payloads)
    if PREVIOUS.encode() not in data:
        return body
    value = await asyncio.to_thread(read_object, data)
    name, said = value.get(PREVIOUS), value.get("input")
    if not isinstance(name, str) or not isinstance(said, str | list):
        return body  # its schema says what is wrong, if anything
    stored = store.get(name, owner_of(body.credentials), PREVIOUS)
    rest = {key: item for key, item in value.items() if key != "input"}

    def written() -> bytes:
        items = stored.before, stored.output, whole(items_json(said), body)
        return b'{"input": [' + b", ".join(filter(None, items)) + b"], " + whole(encode(rest), body)[1:]

    data = await asyncio.to_thread(written)
    try:
        await arena.prepare(len(data))
        region = Region(arena, len(data))
    except ArenaTooSmall:
        raise RequestError(413, "The conversation exceeds the memory that there is for request bodies.", PREVIOUS) from None
    except ArenaFull:
        raise overloaded("The server holds too many request bodies right now.") from None
    longer = body.replaced(region, Scanner(secrets.token_hex(16), max_references))

    def fill() -> None:
        region.append(data)
        longer.scanner.feed(data)
        check_text_bytes(longer.scanner.num_text_bytes)

    with contextlib.ExitStack() as undo:
        undo.callback(longer.give_up)
        await asyncio.to_thread(fill)
        undo.pop_all()
    body.give_up()
    return longer
