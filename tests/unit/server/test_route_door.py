"""The proxy's clients before a request of theirs is there. Red if they can hold what others need, or if one at work loses its answer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from server import route_door
from server.route_door import Connection, Door, through_door

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HEADER_S, MIN_WAIT_S = 0.3, 0.05
TIMEOUT_S = 10

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class House:
    """A server behind a door. A request waits until it `may_answer`."""

    door: Door
    port: int = 0
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    num_at_work: int = 0
    clients: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self, data: bytes = b"") -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(writer)
        writer.write(data)
        return reader, writer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.num_at_work += 1
        await self.may_answer.wait()
        return web.Response(text="served")

    async def work(self, count: int) -> list[Streams]:
        """So many clients whose requests are being worked on."""
        streams = [await self.connect(REQUEST) for _ in range(count)]
        await until(lambda: self.num_at_work == count)
        return streams


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def answer(streams: Streams) -> bytes:
    """All of an answer, whose body is as long as it says."""
    async with asyncio.timeout(TIMEOUT_S):
        head = await streams[0].readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        return head + await streams[0].readexactly(length)


async def is_ended(streams: Streams) -> bool:
    async with asyncio.timeout(TIMEOUT_S):
        try:
            return await streams[0].read() == b""
        except ConnectionResetError:
            return True


async def tell_health(request: web.Request) -> web.StreamResponse:
    return web.Response(text="well")


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(route_door, "MIN_WAIT_SECONDS", MIN_WAIT_S)
    monkeypatch.setattr(route_door, "NUM_RESERVED", 2)
    house = House(Door(2))
    app = web.Application(middlewares=[through_door])
    app.router.add_get("/health", tell_health)
    app.router.add_get("/", house.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
    await runner.setup()
    make_http = runner.server
    assert make_http is not None
    accepting = await asyncio.get_running_loop().create_server(lambda: Connection(house.door, make_http()), "127.0.0.1", 0)
    house.port = accepting.sockets[0].getsockname()[1]
    yield house
    for client in house.clients:
        client.close()
    await until(lambda: house.door.num_open == 0 and not house.door.waiting)
    accepting.close()
    await runner.cleanup()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are not awaited for long."""
    monkeypatch.setattr(route_door, "HEADER_SECONDS", HEADER_S)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("data", [b"", b"GET / HT", REQUEST[:-1]])
async def test_a_head_that_does_not_come_is_not_awaited_for_ever(house: House, data: bytes) -> None:
    assert await is_ended(await house.connect(data))


@pytest.mark.usefixtures("quick")
async def test_an_answer_may_take_longer_than_a_head(house: House) -> None:
    """Also the second one of a connection, and what comes between the two."""
    (streams,) = await house.work(1)
    await asyncio.sleep(2 * HEADER_S)
    house.may_answer.set()
    assert (await answer(streams)).endswith(b"served")
    await asyncio.sleep(2 * HEADER_S)  # idle, not in a head
    house.may_answer.clear()
    streams[1].write(REQUEST)
    await until(lambda: house.num_at_work == 2)
    await asyncio.sleep(2 * HEADER_S)
    house.may_answer.set()
    assert (await answer(streams)).endswith(b"served")
    streams[1].write(REQUEST[:-3])
    assert await is_ended(streams)


async def test_who_waits_longest_makes_room(house: House) -> None:
    first, second = [await house.connect() for _ in range(2)]
    await until(lambda: house.door.num_open == 2)
    await asyncio.sleep(MIN_WAIT_S)
    (third,) = await house.work(1)
    assert await is_ended(first)
    house.may_answer.set()
    assert (await answer(third)).endswith(b"served")
    second[1].write(REQUEST)
    assert (await answer(second)).endswith(b"served")


async def test_a_request_that_nobody_has_read_yet_stays(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a burst of clients ends those that came first."""
    monkeypatch.setattr(route_door, "MIN_WAIT_SECONDS", 60)
    early = [await house.connect() for _ in range(2)]
    assert (await answer(await house.connect(REQUEST))).startswith(b"HTTP/1.1 503")
    house.may_answer.set()
    for streams in early:
        streams[1].write(REQUEST)
    assert all([(await answer(streams)).endswith(b"served") for streams in early])


async def test_with_all_at_work_health_is_told_and_nothing_else(house: House) -> None:
    working = await house.work(2)
    told, refused = [await house.connect(data) for data in (HEALTH, REQUEST)]
    assert (await answer(told)).endswith(b"well") and await is_ended(told)
    text = await answer(refused)
    assert text.startswith(b"HTTP/1.1 503") and b"as many connections" in text and await is_ended(refused)
    house.may_answer.set()
    assert all([(await answer(streams)).endswith(b"served") for streams in working])


async def test_the_reserve_ends_somewhere(house: House) -> None:
    await house.work(2)
    reserve = [await house.connect() for _ in range(3)]
    ended = [asyncio.create_task(is_ended(streams)) for streams in reserve]
    done, _ = await asyncio.wait(ended, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    assert done and len(done) < 3
    for task in ended:
        task.cancel()
