"""Measure the promises of docs/promises.md: stalls of other streams, limits, latency of `/health`, memory, without a verdict.

    python -m bench guard --seconds 6 --json guard.json

Starts an engine with the demo model, or measures a running one (`--url`, `--api-key`; `--pid` of its launcher for memory). A stall is the
longest gap between chunks of another client's stream during an attack, above the longest gap of an idle engine. `bench load --rate`,
`bench stress` and `bench faults` measure the promises about overload, long runs and signals.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from PIL import Image

from bench.client import chat_body, text_of, user_message, watch_health
from bench.faults import engine
from bench.flags import make_parser
from bench.pictures import data_uri
from bench.processes import memory_mib, roles_of
from bench.report import table, write_result

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: guard\r\nTransfer-Encoding: chunked\r\n\r\n"
HUGE = 13_000  # pixels
NUM_CLIENTS = 10  # at once
STALL = "at most 0.2 s"
UNKNOWN = "unknown without --pid"
PROMPTS = {"prompt": [f"{i} " + text_of(1200, i) for i in range(16)], "max_tokens": 4}
CALL = r"<tool_call>\n<function=f>\n"


@dataclass(slots=True)
class Target:
    """Engine under test."""

    url: str
    model: str
    session: aiohttp.ClientSession
    seconds: float  # duration of an attack
    pid: int | None  # launcher
    idle_gap: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)  # MiB by role, before the attacks


Measure = Callable[[Target], Awaitable[str]]  # result of a probe, or outcome of an attack


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("guard", __doc__, "url", "api-key", "pid", "json", url=None, api_key="guard")
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of an attack")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="parts of the names of probes to run")
    return parser.parse_args(argv)


@dataclass(slots=True)
class OtherStream:
    """Another client's stream, restarted when it ends."""

    gaps: list[float] = field(default_factory=list)
    last: float | None = None

    async def listen(self, target: Target) -> None:
        """Run until cancelled. RuntimeError if the stream is rejected."""
        body = chat_body(target.model, [user_message([], "Hello")], 4000)
        while True:
            async with target.session.post(CHAT, json=body) as response:
                if response.status != 200:
                    raise RuntimeError(f"the stream was refused: {response.status} {(await response.text())[:200]}")
                async for line in response.content:
                    if b'"content":"' in line:
                        self.take()
            self.last = None

    def take(self) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.gaps.append(now - self.last)
        self.last = now


async def longest(target: Target, attack: Measure) -> tuple[float, float, str]:
    """Return the longest gap of another stream and the slowest `/health` during an attack in seconds, and the attack's outcome."""
    stream, health = OtherStream(), list[float]()
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(stream.listen(target)), group.create_task(watch_health(target.url, health))]
        while len(stream.gaps) < 3:
            await asyncio.sleep(0.05)
        stream.gaps.clear()
        health.clear()
        outcome = await attack(target)
        stream.take()  # a gap that has not ended counts
        for other in others:
            other.cancel()
    return max(stream.gaps), max(health, default=0.0), outcome


async def idle(target: Target) -> str:
    """Measure the idle values for comparison."""
    target.idle_gap, health, _ = await longest(target, lambda target: asyncio.sleep(target.seconds, ""))
    target.memory = memory_mib(target.pid)
    return f"longest gap {target.idle_gap:.3f} s, /health {health:.3f} s"


def stall(attack: Measure) -> Measure:
    """Return a probe of another stream's stall during an attack."""

    async def probe(target: Target) -> str:
        gap, health, outcome = await longest(target, attack)
        return f"{max(0.0, gap - target.idle_gap):.3f} s, /health {health:.3f} s; {outcome}"

    return probe


def requests(path: str, *bodies: dict[str, Any], clients: int = 1) -> Measure:
    """Run clients that send the bodies in turn until the time is over."""
    encoded = [json.dumps(body).encode() for body in bodies]

    async def attack(target: Target) -> str:
        statuses, end = Counter[int](), time.monotonic() + target.seconds

        async def client() -> None:
            while True:
                for body in encoded:
                    async with target.session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
                        await response.read()
                        statuses[response.status] += 1
                if time.monotonic() > end:
                    return

        await asyncio.gather(*(client() for _ in range(clients)))
        return answers_of(statuses)

    return attack


def answers_of(statuses: Counter[int]) -> str:
    return "HTTP " + ", ".join(f"{status} x {count}" for status, count in sorted(statuses.items()))


async def raw_status(target: Target, *pieces: bytes) -> int:
    """Send bytes without an API key. Return the status of the response, 0 without one."""
    host, _, port = target.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        words = (await reader.readline()).split()
        return int(words[1]) if len(words) > 1 else 0
    except ConnectionError:
        return 0
    finally:
        writer.close()


def blank_lines(connections: int) -> Measure:
    """Chunked bodies of newlines without a key, on each of so many connections."""
    pieces = HEAD, b"40000\r\n", b"\n" * 0x40000, b"\r\n0\r\n\r\n"

    async def attack(target: Target) -> str:
        statuses, end = Counter[int](), time.monotonic() + target.seconds

        async def client() -> None:
            while time.monotonic() < end:
                statuses[await raw_status(target, *pieces)] += 1

        await asyncio.gather(*(client() for _ in range(connections)))
        return answers_of(statuses)

    return attack


def ask(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0} | fields


def video(kind: str, data: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"data:video/{kind};base64,{data}"}}


def picture(mode: str, kind: str) -> dict[str, Any]:
    """Return a small file of many pixels."""
    file = io.BytesIO()
    Image.new(mode, (HUGE, HUGE)).save(file, kind)
    uri = data_uri(file.getvalue()).replace("image/jpeg", f"image/{kind.lower()}")
    return {"type": "image_url", "image_url": {"url": uri}}


def calls(pattern: str) -> Measure:
    """Return a request with tools whose answer follows the client's pattern; a bias excludes the model's own call notation."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
    body = ask(tools=[tool], structured_outputs={"regex": pattern}, max_tokens=1500)

    async def attack(target: Target) -> str:
        started = time.monotonic()
        async with target.session.post("/tokenize", json={"prompt": "<", "add_special_tokens": False}) as response:
            bias = {str(token): 100 for token in (await response.json())["tokens"]}
        async with target.session.post(CHAT, json=body | {"logit_bias": bias}) as response:
            usage = (await response.json()).get("usage", {})
        return f"HTTP {response.status}, {usage.get('completion_tokens', 0)} tokens in {time.monotonic() - started:.1f} s"

    return attack


def broken_clips() -> list[dict[str, Any]]:
    from bench.video import make_clip  # needs PyAV

    clip = make_clip(0, "tiny")
    files = clip[: len(clip) // 2], clip[:200] + os.urandom(len(clip) - 200), os.urandom(1 << 16)
    return [ask(video("mp4", base64.b64encode(file).decode())) for file in files]


def schema(salt: int) -> dict[str, Any]:
    properties = {f"p{salt}_{i}": {"type": "string"} for i in range(3000)}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": properties}}}
    return ask(response_format=form)


def limit(attack: Measure) -> Measure:
    """Return a probe that sends once and measures the response time."""

    async def probe(target: Target) -> str:
        started = time.monotonic()
        outcome = await attack(replace(target, seconds=0.0))
        return f"{outcome} after {time.monotonic() - started:.2f} s"

    return probe


async def arenas(target: Target) -> str:
    """Return the memory of the engine's shared-memory files."""
    if target.pid is None:
        return UNKNOWN
    found = {}
    for process in roles_of(target.pid).values():
        for link in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                state = link.stat()
                if "memfd:" in os.readlink(link):
                    found[state.st_ino] = state.st_blocks * 512
    return f"{sum(found.values()) >> 20} MiB"


async def growth(target: Target) -> str:
    grown = {role: size - target.memory.get(role, size) for role, size in memory_mib(target.pid).items()}
    return ", ".join(f"{role} {size:+d} MiB" for role, size in grown.items()) or UNKNOWN


# Name, promised value, and factory of the probe: bodies are made before the clock starts.
PROBES: tuple[tuple[str, str, Callable[[], Measure]], ...] = (
    ("shared memory of an idle engine", "at most 256 MiB", lambda: arenas),
    ("idle engine", "", lambda: idle),
    ("chunked body of blank lines without a key", STALL, lambda: stall(blank_lines(1))),
    ("the same body on 16 connections", STALL, lambda: stall(blank_lines(16))),
    ("video of 3,000,000 commas", STALL, lambda: stall(requests(CHAT, ask(video("jpeg", "," * 3_000_000))))),
    ("XML parameters of a tool call, 1,500 tokens", STALL, lambda: stall(calls(CALL + "(<parameter=a>){1500}"))),
    ("one XML parameter of 1,500 tokens", STALL, lambda: stall(calls(CALL + "<parameter=a>\n[a-z ]{8000}"))),
    ("1,000 embeddings", STALL, lambda: stall(requests("/v1/embeddings", {"input": [f"Text {i}" for i in range(1000)]}))),
    ("2,000,000 ids to detokenize", STALL, lambda: stall(requests("/detokenize", {"tokens": [5] * 2_000_000}))),
    ("16 long prompts, first new, then cached", STALL, lambda: stall(requests("/v1/completions", PROMPTS))),
    ("images of 169 megapixels", STALL, lambda: stall(requests(CHAT, ask(picture("1", "PNG")), ask(picture("L", "JPEG"))))),
    (f"broken videos of {NUM_CLIENTS} clients", STALL, lambda: stall(requests(CHAT, *broken_clips(), clients=NUM_CLIENTS))),
    ("schemas of 3,000 properties", STALL, lambda: stall(requests(CHAT, *(schema(i) for i in range(3))))),
    ("1,000,000 JSON values", "at most 0.25 s", lambda: stall(requests(CHAT, {"messages": [0] * 1_000_000}))),
    ("seven images of 169 megapixels", "HTTP 413", lambda: limit(requests(CHAT, ask(*[picture("1", "PNG")] * 7)))),
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
            process, url = await stack.enter_async_context(engine(["--api-key", args.api_key]))
            pid = process.pid
        headers, timeout = {"Authorization": f"Bearer {args.api_key}"}, aiohttp.ClientTimeout(total=600)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(url, headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        )
        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        return await guard(Target(url, model, session, args.seconds, pid), args.only)


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    args = parse_args(argv)
    findings = uvloop.run(run(args))
    print(table(["probe", "promised", "measured"], findings))
    write_result(args, result=findings)


if __name__ == "__main__":
    main()
