"""Sends more requests than the server can serve: how many it serves and refuses, and how long the served ones wait.

    python -m bench.overload --url http://127.0.0.1:8000 --concurrency 8 --seconds 300 --pid LAUNCHER

A closed loop of `--concurrency` clients measures the capacity; then `--factor` times as many requests per second are sent, at a fixed
rate. `--pid` is the launcher's process, for memory. Start the server with `--max-queued-requests` of a few times the clients.
"""

import argparse
import asyncio
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from bench.client import Answer, ChatClient, chat_body, text_of, user_message
from bench.pictures import data_uri, make_jpegs
from bench.processes import own_memory, roles_of
from bench.report import percentile, table, write_result

NUM_IMAGES = 16
HEALTH_PAUSE_S = 0.1


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the overload; the closed loop takes a third of it")
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--resolution", default="720p", help="of the image of every second request")
    parser.add_argument("--pid", type=int, help="the launcher, on this machine")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    return parser.parse_args(argv)


class Load:
    """Requests, each its own, half of them with an image."""

    def __init__(self, args: argparse.Namespace, model: str):
        self._args = args
        self._model = model
        self._numbers = itertools.count()
        self._jpegs = [data_uri(jpeg) for jpeg in make_jpegs(0, NUM_IMAGES, args.resolution, "smooth")]

    def body(self) -> dict[str, Any]:
        number = next(self._numbers)
        images = [self._jpegs[number % len(self._jpegs)]] if number % 2 else []
        return chat_body(self._model, [user_message(images, text_of(self._args.input_tokens, number))], self._args.output_tokens)


async def closed_loop(client: ChatClient, load: Load, concurrency: int, seconds: float) -> list[Answer]:
    """Clients that each send their next request after an answer."""
    answers: list[Answer] = []
    end = time.perf_counter() + seconds

    async def one_client() -> None:
        while time.perf_counter() < end:
            answers.append(await client.chat(load.body()))

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return answers


async def open_loop(client: ChatClient, load: Load, per_second: float, seconds: float) -> list[Answer]:
    """Requests at a fixed rate."""
    tasks, started = [], time.perf_counter()
    while (now := time.perf_counter() - started) < seconds:
        tasks.append(asyncio.create_task(client.chat(load.body())))
        await asyncio.sleep(max(0.0, len(tasks) / per_second - now))
    return await asyncio.gather(*tasks)


async def watch_health(url: str, times: list[float]) -> None:
    """Records the time of each answer, until cancelled; infinite if it is not 200."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while True:
            started = time.perf_counter()
            async with session.get(f"{url}/health") as response:
                times.append(time.perf_counter() - started if response.status == 200 else float("inf"))
            await asyncio.sleep(HEALTH_PAUSE_S)


def memory(pid: int | None) -> dict[str, int]:
    return {} if pid is None else {role: own_memory(child) >> 20 for role, child in roles_of(pid).items()}


def goodput(answers: list[Answer], seconds: float) -> float:
    return sum(answer.error is None for answer in answers) / seconds


async def overload(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run as numbers."""
    async with ChatClient(args.url) as client:
        load = Load(args, await client.model())
        await asyncio.gather(*(client.chat(load.body()) for _ in range(2 * NUM_IMAGES)))  # both loops find the same images known
        started = time.perf_counter()
        closed = await closed_loop(client, load, args.concurrency, args.seconds / 3)
        served = goodput(closed, time.perf_counter() - started)
        before, health = memory(args.pid), list[float]()
        watcher = asyncio.create_task(watch_health(args.url, health))
        started = time.perf_counter()
        answers = await open_loop(client, load, args.factor * served, args.seconds)
        seconds = time.perf_counter() - started
        watcher.cancel()
    waits = [answer.ttft for answer in answers if answer.error is None]
    overloaded = goodput(answers, seconds)
    return {
        "closed_loop_per_s": round(served, 3),
        "overload_per_s": round(overloaded, 3),
        "goodput_ratio": round(overloaded / served, 3),
        "asked": len(answers),
        "refusals": Counter((answer.error or "served").partition(":")[0] for answer in answers),
        "wait_s": {name: round(value, 3) for name, value in (("median", percentile(waits, 50)), ("max", max(waits)))},
        "wait_max_by_median": round(max(waits) / percentile(waits, 50), 2),
        "health_ms": {"p50": round(1e3 * percentile(health, 50), 1), "p99": round(1e3 * percentile(health, 99), 1)},
        "memory_mib": {role: [before[role], after] for role, after in memory(args.pid).items()},
    }


def main() -> None:
    """Entry point."""
    args = parse_args()
    result = uvloop.run(overload(args))
    print(table(["", "value"], [[name, str(dict(value) if isinstance(value, Counter) else value)] for name, value in result.items()]))
    write_result(args, result=result)


if __name__ == "__main__":
    main()
