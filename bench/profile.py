"""Kernels of a request with many images or of several streams, and the times in which the GPU idles meanwhile.

    python -m bench profile --model Qwen3-VL-8B --images 32 --resolution 720p
    python -m bench profile --model Qwen3-VL-8B-FP8 --images 0 --streams 1 8 64 --output-tokens 400
    python -m bench profile --model Qwen3-VL-30B-A3B --images 0 --streams 64 --output-tokens 64 --experts

Starts an engine, with dummy weights for a published size, whose worker records its kernels (bench/tracing.py): of the prompts, or, with
`--output-tokens`, of 0.35 s of decoding. `--experts` counts the distinct experts of each layer and step instead, and their expected number.
"""

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

import msgspec
import uvloop

from bench.client import ChatClient
from bench.flags import make_parser
from bench.load import drive, make_bodies
from bench.processes import engine_flags, roles_of, running_engine
from bench.report import table, write_result
from bench.tracing import EXPERTS, SIGNAL, Recording

TEXT_TOKENS = 256
WARM_UPS = 2
SHOWN, WIDTH = 12, 60  # rows and columns of tables
LIMIT_S = 120.0  # to start or write a recording
WINDOW_S, MARGIN = 0.35, 1.3  # seconds recorded, after so many longest TTFTs


async def measure(args: argparse.Namespace, file: Path) -> list[Recording]:
    found: list[Recording] = []

    async def signalled(result: Path) -> None:
        os.kill(worker, SIGNAL)
        async with asyncio.timeout(LIMIT_S):
            while not result.exists():
                await asyncio.sleep(0.05)

    async def longest_ttft(streams: int) -> float:
        args.seed += streams
        answers = await drive(client, make_bodies(args, model, streams, args.seed, client.words), streams)
        if errors := [answer.error for answer in answers if answer.error]:
            raise SystemExit(f"the request failed: {errors[0]}")
        return max(answer.ttft for answer in answers)

    flags, started, is_window = engine_flags(args.model, args.flags), Path(f"{file}.started"), args.output_tokens > 1 and not args.experts
    async with running_engine(flags, ("bench.tracing", str(file))) as (process, url), ChatClient(url) as client:
        worker, args.input_tokens, args.fields = roles_of(process.pid)["bench.tracing"], TEXT_TOKENS, {}
        model = await client.model()
        await client.learn_words(model)
        for streams in args.streams:
            longest = [await longest_ttft(streams) for _ in range(WARM_UPS)][-1]
            if not is_window:
                await signalled(started)
            driving = asyncio.create_task(longest_ttft(streams))
            if is_window:
                await asyncio.sleep(MARGIN * longest)
                await signalled(started)
                await asyncio.sleep(WINDOW_S)
                if driving.done():
                    raise SystemExit("the answers need more --output-tokens")
            else:
                await driving
            await signalled(file)
            await driving
            found.append(msgspec.json.decode(file.read_bytes(), type=Recording))
            file.unlink()
    return found


def main() -> None:
    parser = make_parser(
        "profile", __doc__, "resolution", "content", "output-tokens", "flags", "seed", "json", content="noise", output_tokens=1
    )
    parser.add_argument("--model", default="Qwen3-VL-8B", help="value of the engine's --model; default: %(default)s")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--streams", type=int, nargs="+", default=[1], help="concurrent requests; default: %(default)s")
    parser.add_argument("--experts", action="store_true", help="count distinct experts instead of recording kernels")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(measure(args, Path(folder, EXPERTS if args.experts else "recording")))
    for streams, recording in zip(args.streams, found, strict=True):
        print(f"{streams} streams, {args.images} x {args.resolution}")
        show_experts(recording) if args.experts else show_kernels(recording)
    write_result(args, result=dict(zip(args.streams, map(msgspec.to_builtins, found), strict=True)))


def show_experts(found: Recording) -> None:
    print(table(["layer", "experts per step", "expected"], [[i, *map("{:.1f}".format, each)] for i, each in enumerate(found.experts)]))


def show_kernels(found: Recording) -> None:
    idle = sum(gap for gap, _, _ in found.gaps)
    print(f"{found.span:.1f} ms from the first kernel to the last, {idle:.2f} ms idle in {len(found.gaps)} gaps")
    print(table(["ms", "calls", "kernel"], [[f"{ms:.3f}", calls, name[:WIDTH]] for name, calls, ms in found.kernels[:SHOWN]]))
    longest = [[f"{gap:.3f}", before[:WIDTH], after[:WIDTH]] for gap, before, after in found.gaps[:SHOWN]]
    print(table(["gap, ms", "after", "before"], longest))
