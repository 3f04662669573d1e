"""Send a signal to each process of an engine in each phase of a request, and check the client, the engine and remaining resources.

    python -m bench faults --roles worker api --phases decode upload --signals SIGKILL SIGSTOP [--flags "--kv-cache-memory-bytes 1G"]

Serves the demo model, a fresh engine for every case. SIGKILL and SIGTERM of a part must end everything with an exit code other than 0
within 15 s, and with an answer to the client unless it was the api; SIGTERM of the launcher ends all cleanly. SIGSTOP must show in
`/health` within 10 s; after `--pause` seconds the process continues, and the engine must continue too.
"""

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import os
import re
import shlex
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from PIL import Image

from bench.client import chat_body, text_of, user_message
from bench.flags import make_parser
from bench.pictures import data_uri, make_jpegs
from bench.processes import is_running, roles_of
from bench.report import table, write_result

ROLES = ("launcher", "api", "processor", "scheduler", "worker")
PHASES = ("upload", "media", "tower", "prefill", "decode")
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
START_S, END_S, CLIENT_S, NOTICE_S, RECOVER_S = 300.0, 15.0, 2.0, 10.0, 15.0
INTO_PHASE_S = 0.4  # after the start of the request
READY = re.compile(r"ready after .*: (http://\S+) serves")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("faults", __doc__, "json")
    for name, choices in (("roles", ROLES), ("phases", PHASES), ("signals", SIGNALS)):
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=list(choices))
    parser.add_argument("--pause", type=float, default=60.0, help="seconds for which a process is stopped")
    parser.add_argument("--flags", default="", help="further flags of the engine, as one string")
    return parser.parse_args(argv)


def large_png() -> str:
    """Return a PNG that takes a decoder about a second."""
    file = io.BytesIO()
    Image.new("RGB", (8000, 8000), (9, 90, 200)).save(file, "PNG", compress_level=1)
    return data_uri(file.getvalue()).replace("image/jpeg", "image/png")


def body_of(phase: str) -> bytes:
    """Return a request that reaches this phase quickly and stays in it for a while."""
    images = {"media": [large_png()], "tower": [data_uri(jpeg) for jpeg in make_jpegs(0, 8, "720p", "smooth")], "upload": [large_png()]}
    text = text_of(2500 if phase == "prefill" else 8, 1)
    return json.dumps(chat_body("demo", [user_message(images.get(phase, []), text)], 3000 if phase == "decode" else 64)).encode()


@contextlib.asynccontextmanager
async def engine(
    flags: Sequence[str] = (),
    module: Sequence[str] = ("engine.serve",),
    folder: Path | None = None,
    prefix: Sequence[str] = (),
) -> AsyncIterator[tuple[Process, str]]:
    """Context of a running engine of the clone in `folder` or of this one; yield it and its address."""
    command = [*prefix, sys.executable, "-m", *module, "--port", "0", "--wedge-timeout", "0", "--no-access-log", "--shutdown-timeout", "5"]
    process = await asyncio.create_subprocess_exec(*command, *flags, stdout=PIPE, stderr=DEVNULL, cwd=folder)
    assert process.stdout is not None
    children: list[int] = []
    try:
        async with asyncio.timeout(START_S):
            while (match := READY.search((line := await process.stdout.readline()).decode())) is None:
                assert line, "the engine did not start"
        children = list(roles_of(process.pid).values())
        yield process, match[1]
    finally:
        with contextlib.suppress(ProcessLookupError, TimeoutError):  # normally removed by itself; if killed, it leaves its run directory
            process.terminate()
            await asyncio.wait_for(process.wait(), END_S)
        for pid in {*children, process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()


async def ask(url: str, body: bytes, is_slow: bool) -> str:
    """Return how a request ends for its client: complete, an error, or a broken connection."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]
            await asyncio.sleep(0.05)

    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180)) as session,
            session.post(f"{url}/v1/chat/completions", data=pieces() if is_slow else body, headers=headers) as response,
        ):
            text = await response.text()
            return "whole" if response.status == 200 and "[DONE]" in text and '"error"' not in text else "error"
    except (aiohttp.ClientError, ConnectionError):
        return "broken connection"


async def health(url: str) -> int:
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session, session.get(f"{url}/health") as response:
            return response.status
    except (aiohttp.ClientError, TimeoutError, ConnectionError):
        return 0


async def seconds_until(url: str, is_well: bool, limit: float) -> float | None:
    """Return the seconds until `/health` has this status, or None."""
    started = time.monotonic()
    while time.monotonic() - started < limit:
        if (await health(url) == 200) == is_well:
            return time.monotonic() - started
        await asyncio.sleep(0.1)
    return None


async def case(role: str, phase: str, name: str, pause: float, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Send one signal and return the outcome."""
    async with engine(flags) as (process, url):
        pids = roles_of(process.pid)
        client = asyncio.create_task(ask(url, body_of(phase), phase == "upload"))
        await asyncio.sleep(INTO_PHASE_S)
        started = time.monotonic()
        os.kill(pids[role], signal.Signals[name])
        found: dict[str, Any] = {"role": role, "phase": phase, "signal": name}
        if name == "SIGSTOP":
            return found | await _stopped(url, pids[role], role, client, pause)
        limit = END_S if role != "launcher" else 2 * END_S  # lets requests finish for 5 s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), limit)
        seconds, code = time.monotonic() - started, process.returncode
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(client), CLIENT_S)
        outcome = client.result() if client.done() else "waits for ever"
        left = [pid for pid in pids.values() if is_running(pid)]
        deadline = time.monotonic() + END_S
        while left and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            left = [pid for pid in left if is_running(pid)]
        is_clean = role == "launcher" and name == "SIGTERM"
        is_told = outcome in ("error", "whole") or (role in ("api", "launcher") and outcome == "broken connection")
        is_good = code is not None and (code == 0) == is_clean and not left and is_told
        return found | {"good": is_good, "seconds": round(seconds, 1), "code": code, "client": outcome, "left": len(left)}


async def _stopped(url: str, pid: int, role: str, client: "asyncio.Task[str]", pause: float) -> dict[str, Any]:
    noticed = None if role == "launcher" else await seconds_until(url, False, NOTICE_S)
    await asyncio.sleep(max(0.0, pause - (noticed or 0.0)))
    os.kill(pid, signal.SIGCONT)
    recovered = await seconds_until(url, True, RECOVER_S)
    outcome = await client
    is_good = (noticed is not None or role == "launcher") and recovered is not None and outcome in ("whole", "error")
    return {"good": is_good, "seconds": noticed and round(noticed, 1), "code": None, "client": outcome, "left": 0}


async def faults(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every case in sequence."""
    results = []
    for name, role, phase in itertools.product(args.signals, args.roles, args.phases):
        results.append(await case(role, phase, name, args.pause, shlex.split(args.flags)))
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    """Entry point: exits with 1 if a case is not good."""
    args = parse_args()
    results = uvloop.run(faults(args))
    print(table(list(results[0]), [list(result.values()) for result in results]))
    write_result(args, result=results)
    sys.exit(not all(result["good"] for result in results))


if __name__ == "__main__":
    main()
