"""Send a signal to each process of an engine in each phase of a request, and check the client, the engine and remaining resources.

    python -m bench faults --roles worker api --phases decode upload --signals SIGKILL SIGSTOP [--flags "--kv-cache-memory-bytes 1G"]

Serves the demo model, a fresh engine for every case. After SIGKILL or SIGTERM to one process the whole engine must exit within 15 s
with a code other than 0, and the client must get an answer unless the process was the api. SIGTERM to the launcher must end the engine
cleanly. `/health` must report a SIGSTOP within 10 s, and the engine must continue with the process, after `--pause` seconds.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import uvloop

from bench.client import ChatClient, chat_body, text_of, user_message
from bench.flags import make_parser
from bench.pictures import blank, make_uris
from bench.processes import is_running, roles_of, running_engine
from bench.report import write_result

ROLES = ("launcher", "api", "processor", "scheduler", "worker")
PHASES = ("upload", "media", "tower", "prefill", "decode")
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
END_S, CLIENT_S, NOTICE_S, RECOVER_S, HEALTH_S = 15.0, 2.0, 10.0, 15.0, 2.0
INTO_PHASE_S = 0.4  # after the start of the request
PIECE_BYTES, PIECE_PAUSE_S = 1 << 16, 0.05  # of a slow upload
LARGE = 8000  # pixels, which take a decoder about a second
BROKEN = "broken connection"


def body_of(phase: str) -> bytes:
    images = make_uris(0, 8, "720p", "smooth") if phase == "tower" else [blank("RGB", LARGE, "PNG")] if phase in ("media", "upload") else []
    text = text_of(2500 if phase == "prefill" else 8, 1)
    return json.dumps(chat_body("demo", [user_message(images, text)], 3000 if phase == "decode" else 64)).encode()


async def ask(client: ChatClient, body: bytes, is_slow: bool) -> str:
    """Return how a request ends for its client: complete, an error, or a broken connection."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), PIECE_BYTES):
            yield body[start : start + PIECE_BYTES]
            await asyncio.sleep(PIECE_PAUSE_S)

    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    try:
        async with client.session.post("v1/chat/completions", data=pieces() if is_slow else body, headers=headers) as response:
            text = await response.text()
            return "whole" if response.status == 200 and "[DONE]" in text and '"error"' not in text else "error"
    except (aiohttp.ClientError, ConnectionError):
        return BROKEN


async def seconds_until(client: ChatClient, is_well: bool, limit: float) -> float | None:
    """Return the seconds until `/health` reports this state; None after `limit` seconds."""
    started = time.monotonic()
    while time.monotonic() - started < limit:
        status = 0
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionError):
            async with client.session.get("health", timeout=aiohttp.ClientTimeout(total=HEALTH_S)) as response:
                status = response.status
        if (status == 200) == is_well:
            return time.monotonic() - started
        await asyncio.sleep(0.1)
    return None


async def case(role: str, phase: str, name: str, pause: float, flags: Sequence[str] = ()) -> dict[str, Any]:
    async with running_engine(flags) as (process, url), ChatClient(url) as client:
        pids = roles_of(process.pid)
        request = asyncio.create_task(ask(client, body_of(phase), phase == "upload"))
        await asyncio.sleep(INTO_PHASE_S)
        started = time.monotonic()
        os.kill(pids[role], signal.Signals[name])
        found: dict[str, Any] = {"role": role, "phase": phase, "signal": name}
        if name == "SIGSTOP":
            return found | await _stopped(client, pids[role], role, request, pause)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S if role != "launcher" else 2 * END_S)  # lets requests finish for 5 s
        seconds, code = time.monotonic() - started, process.returncode
        await asyncio.wait([request], timeout=CLIENT_S)
        outcome = request.result() if request.done() else "waits for ever"
        deadline = time.monotonic() + END_S
        while (left := sum(map(is_running, pids.values()))) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        is_clean = role == "launcher" and name == "SIGTERM"
        is_answered = outcome in ("error", "whole") or (role in ("api", "launcher") and outcome == BROKEN)
        is_good = code is not None and (code == 0) == is_clean and not left and is_answered
        return found | {"good": is_good, "seconds": round(seconds, 1), "code": code, "client": outcome, "left": left}


async def _stopped(client: ChatClient, pid: int, role: str, request: "asyncio.Task[str]", pause: float) -> dict[str, Any]:
    noticed = None if role == "launcher" else await seconds_until(client, False, NOTICE_S)
    await asyncio.sleep(max(0.0, pause - (noticed or 0.0)))
    os.kill(pid, signal.SIGCONT)
    recovered = await seconds_until(client, True, RECOVER_S)
    outcome = await request
    is_good = (noticed is not None or role == "launcher") and recovered is not None and outcome in ("whole", "error")
    return {"good": is_good, "seconds": noticed and round(noticed, 1), "code": None, "client": outcome, "left": 0}


async def faults(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for name, role, phase in itertools.product(args.signals, args.roles, args.phases):
        results.append(await case(role, phase, name, args.pause, shlex.split(args.flags)))
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = make_parser("faults", __doc__, "flags", "json")
    for name, choices in (("roles", ROLES), ("phases", PHASES), ("signals", SIGNALS)):
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=list(choices))
    parser.add_argument("--pause", type=float, default=60.0, help="seconds for which a process is stopped")
    args = parser.parse_args()
    results = uvloop.run(faults(args))
    write_result(args, result=results)
    sys.exit(not all(result["good"] for result in results))
