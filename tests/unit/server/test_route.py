"""The affinity proxy: where requests go, that bytes pass as they come, and its limits. Replicas are small servers on free ports."""

import asyncio
import base64
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable

import aiohttp
import pytest
from aiohttp import web

from server import proxy
from server.proxy import IMAGE_BYTES, SCANNED_BYTES, Balancer, Body
from tests.eventually import HANG_GUARD_S, eventually_async
from tests.unit.server.routing import Replica, patient_proxy, routed  # noqa: F401

pytestmark = pytest.mark.usefixtures("patient_proxy")


def balancer(num_backends: int) -> Balancer:
    made = Balancer([f"http://replica-{index}:8000" for index in range(num_backends)])
    for backend in made.backends:
        backend.healthy = True
    return made


def homes(made: Balancer, keys: list[bytes]) -> dict[bytes, str]:
    found = {}
    for key in keys:
        backend = made.take(key)
        assert backend is not None
        found[key] = backend.url
        backend.num_in_flight -= 1
    return found


KEYS = [hashlib.sha256(str(index).encode()).digest() for index in range(4000)]


def body_with(*images: bytes) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(image).decode()}} for image in images]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()


# Where requests go


def test_the_bound_holds_and_the_rest_goes_where_least_runs() -> None:
    """Fails if one hot key fills its replica while others idle."""
    made = balancer(4)
    for count in range(1, 101):
        assert made.take(KEYS[0]) is not None
        bound = max(4, -(-5 * count // 16))  # ceil(1.25 * count / 4)
        assert max(backend.num_in_flight for backend in made.backends) <= bound
    few = balancer(4)
    taken = [few.take(KEYS[0]) for _ in range(8)]
    assert taken[:4] == [taken[0]] * 4 and taken[4:] == [taken[4]] * 4 and taken[0] is not taken[4]
    for backend in taken:
        assert backend is not None
        backend.num_in_flight -= 1
    assert few.take(KEYS[0]) is taken[-1]  # what went on stays: its images are there now
    assert Balancer(["http://a"]).take(b"") is None  # nothing is healthy yet
    assert [backend.url for backend in Balancer(["https://a/b/", "a:1"]).backends] == ["https://a/b", "http://a:1"]


def test_keys_are_remembered_by_their_hashes() -> None:
    made = balancer(4)
    homes(made, [key * 1000 for key in KEYS])
    assert made._homes and all(len(key) == 32 for key in made._homes)


# The key


async def key_of(body: bytes, cuts: list[int]) -> tuple[bytes, int]:
    pieces = iter([body[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True)])

    async def receive() -> dict[str, object]:
        piece = next(pieces, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    read = Body(receive, {"headers": [(b"content-length", b"%d" % len(body))]})
    return await read.find_image(), len(read.held)


async def test_the_key_is_the_same_however_a_body_is_split() -> None:
    payload = base64.b64encode(b"a small picture") + b'"'
    body = b'{"a":"data:text,x","b":"data: see data:,","url":"data:image/png;charset=x;base64,' + payload + b',"c":"data:i/p;base64,AAAA"}'
    assert all([(await key_of(body, [cut]))[0] == payload for cut in range(len(body))])
    assert (await key_of(body, list(range(1, len(body)))))[0] == payload
    assert all([(await key_of(body, [cut, cut + 7]))[0] == payload for cut in range(len(body) - 7)])


async def test_the_longest_image_is_found_behind_much_text_and_none_behind_more() -> None:
    header, payload = b'"data:' + b"x" * 256 + b";base64,", b"A" * 8192
    assert len(header + payload) == IMAGE_BYTES
    body = b" " * 1000 + header + payload + b"B" * 10_000
    assert await key_of(body, [len(body) - 10_000]) == (payload, len(body) - 10_000)
    far = b" " * (SCANNED_BYTES - IMAGE_BYTES)
    for cut in range(len(far), SCANNED_BYTES, 97):
        assert (await key_of(far + header + payload + b"B", [cut]))[0] == payload
        assert (await key_of(far + b" " + header + payload + b"B", [cut]))[0] == b""


async def test_session_and_image_decide_where_a_request_goes() -> None:
    async with routed(*(Replica(str(index)) for index in range(4))) as running:
        for index in range(5):
            session = f"conversation {index}"
            assert len({await running.ask(session) for _ in range(3)}) == 1
            assert len({await running.ask(body=body_with(b"image %d" % index, b"other %d" % turn)) for turn in range(3)}) == 1
        assert all(replica.num_requests for replica in running.replicas)


def test_a_key_keeps_its_replica_and_a_change_moves_few() -> None:
    made = balancer(4)
    before = homes(made, KEYS)
    assert homes(made, KEYS) == before
    counts = Counter(before.values())
    assert len(counts) == 4 and max(counts.values()) <= 1.05 * min(counts.values())
    gone = made.backends[1]
    gone.healthy = False
    after = homes(made, KEYS)
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == gone.url}
    gone.healthy = True
    assert homes(made, KEYS) == after


# Bytes


async def test_events_pass_as_they_come() -> None:
    has_read = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"X-Request-Id": "7", "Connection": "X-Hop", "X-Hop": "1"})
        await response.prepare(request)
        for number in range(20):
            await response.write(b"data: %d\n\n" % number)
            await asyncio.wait_for(has_read.wait(), HANG_GUARD_S)
            has_read.clear()
        return response

    async with routed(Replica("a", stream)) as running, running.client.get(running.url) as answer:
        assert answer.headers["X-Request-Id"] == "7" and "X-Hop" not in answer.headers
        for number in range(20):
            assert await answer.content.readany() == b"data: %d\n\n" % number
            has_read.set()
        assert await answer.content.read() == b""


async def test_request_headers_paths_and_encodings_pass_unchanged() -> None:
    """Replicas believe the last forwarded address that is no proxy's."""
    seen: list[web.Request] = []

    async def keep(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        return web.Response(status=307, headers={"Location": "/elsewhere", "Content-Encoding": "x-packed"}, body=b"packed")

    headers = {"Authorization": "Bearer k", "X-Hop": "1", "Connection": "keep-alive, X-Hop", "Content-Type": "application/json"}
    skipped = ("User-Agent", "Accept", "Accept-Encoding")
    async with routed(Replica("a", keep)) as running, aiohttp.ClientSession(skip_auto_headers=skipped, auto_decompress=False) as client:
        url = f"{running.url}/v1/models/a%2Fb?q=%20x"
        for given in ({}, {"X-Forwarded-For": "9.9.9.9"}, {"X-Forwarded-For": "1.1.1.1, 9.9.9.9"}):
            async with client.post(url, data=b"{}", headers={**headers, **given}, allow_redirects=False) as answer:
                assert (answer.status, answer.headers["Location"], await answer.read()) == (307, "/elsewhere", b"packed")
            addresses = ", ".join([*given.values(), "127.0.0.1"])
            assert seen[-1].headers["X-Forwarded-For"] == addresses and seen[-1].raw_path == "/v1/models/a%2Fb?q=%20x"
    names = {name.lower(): value for name, value in seen[0].headers.items()}
    assert names.keys() == {"host", "authorization", "content-type", "content-length", "x-forwarded-for", "x-forwarded-proto"}
    assert names["x-forwarded-proto"] == "http" and names["content-length"] == "2"
    assert names["host"] == running.url.removeprefix("http://")


async def test_large_bodies_pass_before_their_rest_is_there() -> None:
    begun, digest = asyncio.Event(), hashlib.sha256()
    keyed = [b'{"url":"data:image/jpeg;base64,' + b"A" * IMAGE_BYTES, *[b"A" * (1 << 20)] * 30]

    async def read(request: web.Request) -> web.StreamResponse:
        received = hashlib.sha256(await request.content.readany())
        begun.set()
        while chunk := await request.content.readany():
            received.update(chunk)
        return web.Response(text=received.hexdigest())

    async def body(pieces: list[bytes]) -> AsyncIterator[bytes]:
        for i, piece in enumerate(pieces):
            digest.update(piece)
            yield piece
            if i == 0:
                await asyncio.wait_for(begun.wait(), HANG_GUARD_S)

    async with routed(Replica("a", read)) as running:
        headers = {"Content-Length": str(sum(map(len, keyed)))}
        async with running.client.post(running.url, data=body(keyed), headers=headers) as answer:
            assert await answer.text() == digest.hexdigest()


async def test_an_early_refusal_reaches_its_client() -> None:

    async def refuse(request: web.Request) -> web.StreamResponse:
        await request.content.readany()
        return web.json_response({"error": {}}, status=413)

    async def body() -> AsyncIterator[bytes]:
        yield b'{"url":"data:image/jpeg;base64,' + b"A" * IMAGE_BYTES
        await asyncio.Event().wait()

    async with routed(Replica("a", refuse)) as running:
        async with running.client.post(running.url, data=body()) as answer:
            assert answer.status == 413
        assert running.proxy.balancer.backends[0].num_in_flight == 0


# Leaving and returning


async def test_health_tells_of_the_replicas_and_follows_them() -> None:
    async with routed(Replica("a"), Replica("b")) as running:
        async with running.client.get(f"{running.url}/health") as answer:
            told = await answer.json()
            assert (answer.status, told["status"], [state["healthy"] for state in told["backends"]]) == (200, "ok", [True, True])
            assert "127.0.0.1" not in json.dumps(told)  # the route is open
        running.replicas[0].healthy = False
        await running.until(num_healthy=1)
        assert {await running.ask(f"{index}") for index in range(10)} == {"b"}
        running.replicas[1].healthy = False
        await running.until(num_healthy=0)
        async with running.client.get(f"{running.url}/health") as answer:
            assert answer.status == 503
        async with running.client.post(f"{running.url}/v1/x", data=b"{}") as answer:
            assert answer.status == 503 and answer.headers["Retry-After"] == "1"
            assert (await answer.json())["error"]["type"] == "server_error"
        running.replicas[0].healthy = running.replicas[1].healthy = True
        await running.until(num_healthy=2)
        assert {await running.ask(f"new {index}") for index in range(20)} == {"a", "b"}


async def test_a_refused_connection_costs_its_client_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "POLL_SECONDS", 3600)
    async with routed(*(Replica(str(index)) for index in range(4))) as running:
        bodies = [body_with(b"image %d" % index) for index in range(12)]
        before = [await running.ask(body=body) for body in bodies]
        await running.replicas[2].kill()
        after = [await running.ask(body=body) for body in bodies]
        assert "2" in before and "2" not in after
        assert [new for old, new in zip(before, after, strict=True) if old != "2"] == [old for old in before if old != "2"]
        await running.replicas[2].start()


async def in_two_parts(request: web.Request, goes_on: asyncio.Event, begins: bool, kind: str = "text/event-stream") -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": kind})
    if begins:
        await response.prepare(request)
        await response.write(b"data: begin\n\n")
    await goes_on.wait()
    await response.write(b"data: [DONE]\n\n")
    return response


async def test_a_death_ends_its_own_streams_with_an_error_and_no_others() -> None:
    goes_on = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        kind = request.headers["X-Kind"]
        return await in_two_parts(request, goes_on, kind != "silent", "text/event-stream" if kind == "sse" else "application/json")

    async with routed(Replica("a", stream), Replica("b", stream)) as running:

        def ask(session: str, kind: str) -> Awaitable[aiohttp.ClientResponse]:
            return running.client.post(running.url, data=b"{}", headers={"x-session-id": session, "X-Kind": kind})

        answers = [await ask(str(index), "sse") for index in range(8)]
        backends = running.proxy.balancer.backends
        assert [backend.num_in_flight for backend in backends] == [4, 4]
        home = running.proxy.balancer.take(b"x")
        assert home is not None
        home.num_in_flight -= 1
        dying = running.of(home.url)
        silent = asyncio.ensure_future(ask("x", "silent"))
        whole = await ask("x", "json")
        await eventually_async(lambda: dying.num_requests == 6, "every request of the replica")
        await dying.kill()
        refused = await asyncio.wait_for(silent, HANG_GUARD_S)
        assert refused.status == 502 and (await refused.json())["error"]["code"] == "replica_gone"
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(whole.read(), HANG_GUARD_S)
        goes_on.set()
        texts = [await asyncio.wait_for(answer.text(), HANG_GUARD_S) for answer in answers]
        assert texts.count("data: begin\n\ndata: [DONE]\n\n") == 4
        lost = [text for text in texts if "[DONE]" not in text]
        assert len(lost) == 4
        for text in lost:
            begin, error, rest = text.split("\n\n")
            assert (begin, rest) == ("data: begin", "")
            assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
        await running.until(num_healthy=1)
        assert [backend.num_in_flight for backend in backends] == [0, 0]
        await dying.start()


@pytest.mark.parametrize("has_begun", [False, True])
async def test_requests_of_a_silent_replica_end(monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    """A stopped process accepts connections and never answers: its requests must not wait for ever. One that stops by itself answers 503
    and finishes them."""
    for name in ("HEALTH_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(proxy, name, 0.05)
    goes_on = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        return await in_two_parts(request, goes_on, has_begun or request.headers["x-session-id"] == "1")

    async with routed(Replica("a", stream), Replica("b", stream)) as running:
        sessions: list[dict[str, str]] = [{"x-session-id": "0"}, {"x-session-id": "1"}]
        asked = [asyncio.ensure_future(running.client.post(running.url, data=b"{}", headers=session)) for session in sessions]
        await eventually_async(lambda: all(replica.num_requests for replica in running.replicas), "both requests")
        home = running.proxy.balancer.take(b"0")
        assert home is not None
        stopped = running.of(home.url)
        (leaving,) = (replica for replica in running.replicas if replica is not stopped)
        stopped.runs.clear()
        leaving.healthy = False
        lost = await asyncio.wait_for(asked[0], HANG_GUARD_S)
        text = await asyncio.wait_for(lost.text(), HANG_GUARD_S)
        assert lost.status == (200 if has_begun else 502) and '"replica_gone"' in text and "[DONE]" not in text
        goes_on.set()
        assert (await (await asked[1]).text()).endswith("data: [DONE]\n\n")
        stopped.runs.set()
        await running.until(num_healthy=1)


async def test_a_client_that_goes_ends_its_request_on_the_replica() -> None:
    started, cancelled = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def stream(request: web.Request) -> web.StreamResponse:
        try:
            if "X-Stream" in request.headers:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await response.write(b"data: x\n\n")
            started.release()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.release()
            raise
        return web.Response()

    async with routed(Replica("a", stream)) as running:
        for headers in ({}, {"X-Stream": "1"}):
            task = asyncio.ensure_future(running.client.post(running.url, data=b"{}", headers=headers))
            await asyncio.wait_for(started.acquire(), HANG_GUARD_S)
            if headers:
                (await task).close()
            else:
                task.cancel()
            await asyncio.wait_for(cancelled.acquire(), HANG_GUARD_S)
        await eventually_async(lambda: not running.proxy.balancer.backends[0].num_in_flight, "no request in flight")
