"""Kernels of one request with many images, and the times in which the GPU idles meanwhile.

    python -m bench profile --model Qwen3-VL-8B --images 32 --resolution 720p

Starts an engine, with dummy weights for a published size, whose worker records its kernels (bench/tracing.py).
"""

import argparse
import asyncio
import os
import signal
import tempfile
from pathlib import Path

import msgspec
import uvloop

from bench.client import ChatClient, chat_body, text_of, user_message
from bench.flags import make_parser
from bench.pictures import make_uris
from bench.processes import engine_flags, roles_of, running_engine
from bench.report import table, write_result
from bench.tracing import Recording

TEXT_TOKENS = 256
WARM_UPS = 2
SHOWN, WIDTH = 12, 60  # rows and columns of the tables
LIMIT_S = 120.0  # to start and to write a recording


async def measure(args: argparse.Namespace, file: Path) -> Recording:

    async def signalled(pid: int, result: Path) -> None:
        os.kill(pid, signal.SIGUSR1)
        async with asyncio.timeout(LIMIT_S):
            while not result.exists():
                await asyncio.sleep(0.05)

    flags = engine_flags(args.model, args.flags)
    async with running_engine(flags, ("bench.tracing", str(file))) as (process, url), ChatClient(url) as client:
        worker, model = roles_of(process.pid)["bench.tracing"], await client.model()
        for i in range(WARM_UPS + 1):
            message = user_message(make_uris(args.seed + i, args.images, args.resolution, args.content), text_of(TEXT_TOKENS, i))
            if i == WARM_UPS:
                await signalled(worker, Path(f"{file}.started"))
            answer = await client.chat(chat_body(model, [message], args.output_tokens))
            if answer.error:
                raise SystemExit(f"the request failed: {answer.error}")
        await signalled(worker, file)
        return msgspec.json.decode(file.read_bytes(), type=Recording)


def main() -> None:
    parser = make_parser(
        "profile", __doc__, "resolution", "content", "output-tokens", "flags", "seed", "json", content="noise", output_tokens=1
    )
    parser.add_argument("--model", default="Qwen3-VL-8B", help="value of the engine's --model; default: %(default)s")
    parser.add_argument("--images", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(measure(args, Path(folder, "recording")))
    idle, size = sum(gap for gap, _, _ in found.gaps), f"{args.images} x {args.resolution}"
    print(f"{size}: {found.span:.1f} ms from the first kernel to the last, {idle:.2f} ms idle in {len(found.gaps)} gaps")
    kernels = [[f"{ms:.3f}", calls, name[:WIDTH]] for name, calls, ms in found.kernels[:SHOWN]]
    print(table(["ms", "calls", "kernel"], kernels))
    longest = [[f"{gap:.3f}", before[:WIDTH], after[:WIDTH]] for gap, before, after in found.gaps[:SHOWN]]
    print(table(["gap, ms", "after", "before"], longest))
    write_result(args, span_ms=found.span, idle_ms=idle, longest=longest, kernels=found.kernels)
