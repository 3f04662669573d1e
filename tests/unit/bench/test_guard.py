"""The table of `bench.guard`: each promise has a probe; what a stall is."""

import asyncio

import pytest

from bench import guard
from bench.guard import PROBES, OtherStream, Target, stall


def target() -> Target:
    return Target("http://127.0.0.1:1", "demo", None, 1.0, None, idle_gap=0.01)  # type: ignore[arg-type]


def test_names_are_those_of_one_probe_each() -> None:
    names = [name for name, _, _ in PROBES]
    assert len(set(names)) == len(names) and all(promised for name, promised, _ in PROBES if name != "idle engine")


async def test_a_stall_is_above_the_gap_of_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def longest(*_: object) -> tuple[float, float, str]:
        return 0.26, 0.02, "HTTP 401 x 7"

    monkeypatch.setattr(guard, "longest", longest)
    assert await stall(lambda _: asyncio.sleep(0, ""))(target()) == "0.250 s, /health 0.020 s; HTTP 401 x 7"


async def test_a_probe_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(_: Target) -> str:
        raise ConnectionRefusedError("no server")

    async def measured(_: Target) -> str:
        return "3 MiB"

    monkeypatch.setattr(guard, "PROBES", (("a", "1", lambda: refused), ("b", "2", lambda: measured)))
    assert await guard.guard(target(), []) == [["a", "1", "not measured: no server"], ["b", "2", "3 MiB"]]
    assert await guard.guard(target(), ["b"]) == [["b", "2", "3 MiB"]]


def test_a_gap_needs_two_chunks() -> None:
    stream = OtherStream()
    stream.take()
    assert not stream.gaps
    stream.take()
    assert len(stream.gaps) == 1
