"""Kernels of a request with many images or of several streams, and the times in which the GPU idles meanwhile.

    python -m bench profile --model Qwen3-VL-8B --images 32 --resolution 720p
    python -m bench profile --model Qwen3-VL-30B-A3B --images 0 --streams 64 --output-tokens 64 --experts

Starts an engine, with dummy weights for a published size, whose worker records its kernels (bench/tracing.py). `--experts` counts the
distinct experts of each layer and step instead, next to their expected number for uniform routing.
"""

import argparse
import asyncio
import os
import signal
import tempfile
from pathlib import Path

import msgspec
import uvloop

from bench.client import ChatClient
from bench.flags import make_parser
from bench.load import drive, make_bodies
from bench.processes import engine_flags, roles_of, running_engine
from bench.report import table, write_result
from bench.tracing import EXPERTS, Recording

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
        worker, args.input_tokens, args.fields = roles_of(process.pid)["bench.tracing"], TEXT_TOKENS, {}
        model = await client.model()
        await client.learn_words(model)
        for i in range(WARM_UPS + 1):
            bodies = make_bodies(args, model, args.streams, args.seed + i * args.streams, client.words)
            if i == WARM_UPS:
                await signalled(worker, Path(f"{file}.started"))
            if errors := [answer.error for answer in await drive(client, bodies, args.streams) if answer.error]:
                raise SystemExit(f"the request failed: {errors[0]}")
        await signalled(worker, file)
        return msgspec.json.decode(file.read_bytes(), type=Recording)


def main() -> None:
    parser = make_parser(
        "profile", __doc__, "resolution", "content", "output-tokens", "flags", "seed", "json", content="noise", output_tokens=1
    )
    parser.add_argument("--model", default="Qwen3-VL-8B", help="value of the engine's --model; default: %(default)s")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--streams", type=int, default=1, help="concurrent requests; default: %(default)s")
    parser.add_argument("--experts", action="store_true", help="count distinct experts instead of recording kernels")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(measure(args, Path(folder, EXPERTS if args.experts else "recording")))
    if args.experts:
        print(table(["layer", "experts per step", "expected"], [[i, *map("{:.1f}".format, each)] for i, each in enumerate(found.experts)]))
        return write_result(args, experts=found.experts)
    idle, size = sum(gap for gap, _, _ in found.gaps), f"{args.images} x {args.resolution}"
    print(f"{size}: {found.span:.1f} ms from the first kernel to the last, {idle:.2f} ms idle in {len(found.gaps)} gaps")
    kernels = [[f"{ms:.3f}", calls, name[:WIDTH]] for name, calls, ms in found.kernels[:SHOWN]]
    print(table(["ms", "calls", "kernel"], kernels))
    longest = [[f"{gap:.3f}", before[:WIDTH], after[:WIDTH]] for gap, before, after in found.gaps[:SHOWN]]
    print(table(["gap, ms", "after", "before"], longest))
    write_result(args, span_ms=found.span, idle_ms=idle, longest=longest, kernels=found.kernels)
