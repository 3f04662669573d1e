"""Measure the promises of docs/promises.md: stalls of other streams, latency of `/health`, memory.

    python -m bench guard --duration 6 --json guard.json

Starts an engine with the demo model, or measures a running one (`--url`, `--api-key`; `--pid` of its launcher for memory). A stall is the
longest gap between chunks of another client's stream during an attack, minus the longest gap on an idle engine; that of a harmless request
of the same size is its control. `bench load --rate` and `bench stress` measure the promises about overload and long runs.
"""

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import uvloop

from bench.client import ChatClient, chat_body, text_of, user_message, watch_health
from bench.flags import make_parser
from bench.pictures import blank, data_uri
from bench.processes import memory_mib, running_engine
from bench.report import table, write_result

CHAT = "v1/chat/completions"
HUGE = 13_000  # pixels
STALL = "at most 0.2 s"
PROMPTS = {"prompt": [f"{i} " + text_of(1200, i) for i in range(16)], "max_tokens": 4}


@dataclass(slots=True)
class Target:
    url: str
    model: str
    client: ChatClient
    seconds: float  # duration of an attack
    pid: int | None  # launcher
    idle_gap: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)  # MiB by role, before the attacks


Measure = Callable[[Target], Awaitable[str]]  # result of a probe, or outcome of an attack


async def listen(target: Target, streams: list[list[float]]) -> None:
    """Open one stream after another until cancelled, and append a list of its chunks' arrival times. RuntimeError if one is rejected."""
    body = chat_body(target.model, [user_message([], "Hello")], 4000)
    while True:
        async with target.client.session.post(CHAT, json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"the stream was refused: {response.status} {(await response.text())[:200]}")
            streams.append([])
            async for line in response.content:
                if b'"content":"' in line:
                    streams[-1].append(time.perf_counter())


async def longest(target: Target, attack: Measure) -> tuple[float, float, str]:
    """Return the longest gap of another client's stream and the slowest `/health`, both in seconds, and the attack's outcome."""
    streams, health = list[list[float]](), list[float]()
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(listen(target, streams)), group.create_task(watch_health(target.url, health))]
        while not streams or len(streams[-1]) < 4:
            await asyncio.sleep(0.05)
        streams[:] = [streams[-1][-1:]]
        health.clear()
        outcome = await attack(target)
        streams[-1].append(time.perf_counter())  # include the gap that has not ended yet
        for other in others:
            other.cancel()
    longest_gap = max(second - first for times in streams for first, second in pairwise(times))
    return longest_gap, max(health, default=0.0), outcome


async def idle(target: Target) -> str:
    target.idle_gap, health, _ = await longest(target, lambda target: asyncio.sleep(target.seconds, ""))
    target.memory = memory_mib(target.pid)
    return f"longest gap {target.idle_gap:.3f} s, /health {health:.3f} s"


def stall(attack: Measure, control: Measure | None = None) -> Measure:
    async def probe(target: Target) -> str:
        found = []
        for measure in (attack, control):
            if measure is not None:
                gap, health, outcome = await longest(target, measure)
                found.append(f"{max(0.0, gap - target.idle_gap):.3f} s, /health {health:.3f} s; {outcome}")
        return "; control: ".join(found)

    return probe


def repeatedly(send: Callable[[Target], AsyncIterator[int]], clients: int) -> Measure:
    """Return an attack of concurrent clients. Each repeats `send`, which yields HTTP statuses, for `Target.seconds`."""

    async def attack(target: Target) -> str:
        statuses, end = Counter[int](), time.monotonic() + target.seconds

        async def client() -> None:
            while True:
                async for status in send(target):
                    statuses[status] += 1
                if time.monotonic() > end:
                    return

        await asyncio.gather(*(client() for _ in range(clients)))
        return "HTTP " + ", ".join(f"{status} x {count}" for status, count in sorted(statuses.items()))

    return attack


def requests(path: str, *bodies: dict[str, Any], clients: int = 1) -> Measure:
    encoded = [json.dumps(body).encode() for body in bodies]

    async def send(target: Target) -> AsyncIterator[int]:
        for body in encoded:
            async with target.client.session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
                await response.read()
                yield response.status

    return repeatedly(send, clients)


def ask(*uris: str, kind: str = "image", **fields: Any) -> dict[str, Any]:
    return {"messages": [user_message([*uris], "What is it?", kind)], "max_tokens": 4, "temperature": 0} | fields


def broken_clips() -> list[dict[str, Any]]:
    from bench.video import make_clip  # needs PyAV

    clip = make_clip(0, "tiny")
    files = clip[: len(clip) // 2], clip[:200] + os.urandom(len(clip) - 200), os.urandom(1 << 16)
    return [ask(data_uri(file, "video/mp4"), kind="video") for file in files]


def schema(salt: int) -> dict[str, Any]:
    properties = {f"p{salt}_{i}": {"type": "string"} for i in range(3000)}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": properties}}}
    return ask(response_format=form)


def shared(num_documents: int) -> dict[str, Any]:
    return {"query": "x" * (1 << 20), "documents": ["x"] * num_documents}


def pattern(rest: str) -> Measure:
    return requests(CHAT, ask(n=16, temperature=1, max_tokens=200, regex="[0-9]{70}!" + rest))


async def growth(target: Target) -> str:
    grown = {role: size - target.memory.get(role, size) for role, size in memory_mib(target.pid).items()}
    return ", ".join(f"{role} {size:+d} MiB" for role, size in grown.items()) or "unknown without --pid"


SLOW_REGEX = "(.*.*.*){1,100}=(.*.*.*){1,100}"

# Name, promised value, and factory of the probe: bodies are made before the clock starts.
PROBES: tuple[tuple[str, str, Callable[[], Measure]], ...] = (
    ("idle engine", "", lambda: idle),
    ("1 MiB shared by 1,000 documents", STALL, lambda: stall(*(requests("rerank", shared(count)) for count in (1000, 1)))),
    ("video of 3,000,000 commas", STALL, lambda: stall(requests(CHAT, ask("data:video/jpeg;base64," + "," * 3_000_000, kind="video")))),
    ("1,000 embeddings", STALL, lambda: stall(requests("v1/embeddings", {"input": [f"Text {i}" for i in range(1000)]}))),
    ("2,000,000 ids to detokenize", STALL, lambda: stall(requests("detokenize", {"tokens": [5] * 2_000_000}))),
    ("16 long prompts, first new, then cached", STALL, lambda: stall(requests("v1/completions", PROMPTS))),
    ("images of 169 megapixels", STALL, lambda: stall(requests(CHAT, ask(blank("1", HUGE, "PNG")), ask(blank("L", HUGE, "JPEG"))))),
    ("broken videos of 10 clients", STALL, lambda: stall(requests(CHAT, *broken_clips(), clients=10))),
    ("schemas of 3,000 properties", STALL, lambda: stall(requests(CHAT, *(schema(i) for i in range(3))))),
    ("pattern that is slow after 70 digits, 16 answers", "at most 0.5 s", lambda: stall(*map(pattern, (SLOW_REGEX, ".{300}")))),
    ("1,000,000 JSON values", "at most 0.25 s", lambda: stall(requests(CHAT, {"messages": [0] * 1_000_000}))),
    ("private memory after all attacks", "below +300 MiB", lambda: growth),
)


async def guard(target: Target, only: list[str]) -> list[list[str]]:
    """Return name, promised and measured value of each probe, or the reason of its failure."""
    findings = []
    for name, promised, make in PROBES:
        if name != "idle engine" and only and not any(word in name for word in only):
            continue
        try:
            measured = await make()(target)
        except* (aiohttp.ClientError, ImportError, OSError, RuntimeError) as problems:
            measured = f"not measured: {problems.exceptions[0]}"
        findings.append([name, promised, measured])
        print(*findings[-1], sep=" | ", flush=True)
    return findings


async def run(args: argparse.Namespace) -> list[list[str]]:
    async with contextlib.AsyncExitStack() as stack:
        url, pid = args.url, args.pid
        if url is None:
            process, url = await stack.enter_async_context(running_engine(["--api-key", args.api_key]))
            pid = process.pid
        client = await stack.enter_async_context(ChatClient(url, args.api_key))
        return await guard(Target(url, await client.model(), client, args.duration, pid), args.only)


def main() -> None:
    parser = make_parser("guard", __doc__, "url", "api-key", "pid", "duration", "json", url=None, api_key="guard", duration=6.0)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="parts of the names of probes to run")
    args = parser.parse_args()
    findings = uvloop.run(run(args))
    print(table(["probe", "promised", "measured"], findings))
    write_result(args, result=findings)
