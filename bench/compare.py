"""Compare this version of the engine with an older one on one machine, in turn, and exit with 1 after a loss of more than 2 %.

    python -m bench compare OLD --models Qwen3-VL-8B Qwen3-VL-8B-FP8 Qwen3-VL-30B-A3B-FP8 --json compare.json

OLD is a commit or a folder. For each model both engines share the device; published sizes get dummy weights. They start one after the
other, answer the same prompts greedily, of which the equal ones are counted, and warm up. Benchmarks of this version measure one engine
after the other, and every second round begins with the new one. A benchmark with a loss runs for as many rounds again. The table has
medians; a gain below zero means that the new version is slower.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import eq
from pathlib import Path
from typing import Any

import uvloop

from bench.client import ChatClient, chat_body, text_of, user_message
from bench.flags import make_parser
from bench.pictures import make_uris
from bench.processes import engine_flags, running_engine
from bench.report import table, write_result

LIMIT = 2.0  # percent
MODELS = ("Qwen3-VL-8B", "Qwen3-VL-8B-FP8", "Qwen3-VL-30B-A3B-FP8")
KERNEL_CACHE = Path("~/.cache/mini-vlm-engine/compare")  # kernel caches of old versions; the new one uses the default ones
RUNS = {
    "one": "load --concurrency 1 --requests 4 --warm-ups 1 --input-tokens 1024 --output-tokens 256",
    "text": "load --concurrency 64 --requests 128 --warm-ups 32 --input-tokens 256 --output-tokens 256",
    "image": "load --concurrency 32 --requests 96 --warm-ups 16 --images 1 --output-tokens 128",
    "images4": "load --concurrency 16 --requests 96 --warm-ups 16 --images 4 --output-tokens 64",
    "probe": "images --content smooth --clock after --resolutions 720p --counts 1,8,32 --repeats 3",
}
WARM_UP = "load --concurrency 64 --requests 64 --input-tokens 256 --output-tokens 64"
GREEDY, GREEDY_TOKENS = 10, 48  # prompts with up to two images each, tokens of an answer
RATES = ("requests_per_s", "output_tokens_per_s")  # higher is better
FIGURE = {"one": "tpot_ms", "text": "output_tokens_per_s", "image": "requests_per_s", "images4": "requests_per_s"}  # of a load

Sample = dict[str, float]  # figure -> value
Samples = dict[str, list[Sample]]  # engine -> one sample per round


@contextlib.contextmanager
def folder_of(old: str) -> Iterator[Path]:
    """Yield the folder OLD, or a temporary one with files of the commit."""
    if Path(old).is_dir():
        yield Path(old).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="bench-compare-") as folder:
        files = subprocess.run(["git", "archive", old], check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=files, check=True)
        yield Path(folder)


def figures(run: str, content: dict[str, Any]) -> Sample:
    """Return the figure of a load, or the times to first token of a probe. ValueError if requests failed."""
    failed = content.get("result", {}).get("errors") or [point["error"] for point in content.get("points", []) if "error" in point]
    if failed:
        raise ValueError(f"{run}: {failed[0]}")
    if run not in FIGURE:
        return {f"{point['resolution']} x {point['images']}, ttft_ms": point["ttft_sent_ms"] for point in content["points"]}
    value = content["result"][FIGURE[run]]
    return {FIGURE[run]: value["p50"] if isinstance(value, dict) else value}


def gain(figure: str, old: float, new: float) -> float:
    """Return by how many percent the new version is faster (negative: slower)."""
    return 100 * (new / old - 1 if figure in RATES else old / new - 1)


def compared(samples: Samples) -> dict[str, tuple[float, float, float]]:
    """Return the medians of the old and the new engine and the gain by figure."""
    medians = {
        name: {figure: statistics.median(sample[figure] for sample in taken) for figure in taken[0]} for name, taken in samples.items()
    }
    return {figure: (old, medians["new"][figure], gain(figure, old, medians["new"][figure])) for figure, old in medians["old"].items()}


def is_loss(samples: Samples) -> bool:
    return any(percent < -LIMIT for *_, percent in compared(samples).values())


def seed_of(command: str, seed: int) -> int:
    """Return a seed of this command alone: no run may find its pictures in an engine's caches."""
    return seed + zlib.crc32(command.encode())


async def run_benchmark(command: str, url: str, seed: int) -> dict[str, Any]:
    """Run a benchmark against a server and return its results. RuntimeError with the end of its output if it fails."""
    name, *flags = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        words = [sys.executable, "-m", "bench", name, "--url", url, "--json", str(path), "--seed", str(seed_of(command, seed)), *flags]
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
        output, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"bench {name} failed: {output.decode()[-2000:]}")
        return dict(json.loads(path.read_text(encoding="utf-8")))


async def rounds(urls: Mapping[str, str], run: str, count: int, samples: Samples) -> None:
    """Add `count` samples of each engine, with other seeds."""
    first = len(samples["old"])
    for number in range(first, first + count):
        for name in list(urls)[:: -1 if number % 2 else 1]:
            samples[name].append(figures(run, await run_benchmark(RUNS[run], urls[name], number)))


async def greedy(url: str) -> list[str]:
    """Return answers at temperature 0, one after the other, so that steps are the same."""
    async with ChatClient(url) as client:
        model = await client.model()
        await client.learn_words(model)
        uris = [make_uris(i, i % 3, "small", "noise") for i in range(GREEDY)]
        messages = [user_message(uris[i], text_of(40 + 200 * (i % 3), i, client.words)) for i in range(GREEDY)]
        return [(await client.chat(chat_body(model, [message], GREEDY_TOKENS))).text for message in messages]


async def compare(args: argparse.Namespace, model: str, old: Path) -> dict[str, Samples]:
    flags, found = engine_flags(model, args.flags), {}
    cache = KERNEL_CACHE.expanduser() / Path(args.old).name
    own = ["env", f"FLASHINFER_WORKSPACE_BASE={cache}", f"TRITON_CACHE_DIR={cache / 'triton'}"]
    async with contextlib.AsyncExitStack() as running:
        urls = {}
        for name, folder, prefix in (("old", old, own), ("new", Path().absolute(), [])):
            started = time.monotonic()
            urls[name] = (await running.enter_async_context(running_engine(flags, folder=folder, prefix=prefix)))[1]
            print(f"{model}: {name} started in {time.monotonic() - started:.1f} s", flush=True)
        answers = [await greedy(url) for url in urls.values()]
        print(f"{model}: {sum(map(eq, *answers))} of {GREEDY} greedy answers are equal", flush=True)
        for url in urls.values():
            await run_benchmark(WARM_UP, url, 0)
        for run in args.runs:
            samples: Samples = defaultdict(list)
            await rounds(urls, run, args.rounds, samples)
            if is_loss(samples):
                await rounds(urls, run, args.rounds, samples)
            found[run] = dict(samples)
            for row in rows_of(model, {run: samples}):
                print(*row, flush=True)  # an interrupted run keeps its results
    return found


def rows_of(model: str, found: Mapping[str, Samples]) -> list[list[str]]:
    return [
        [model, run, figure, f"{old:.4g}", f"{new:.4g}", f"{percent:+.1f} %", "loss" if percent < -LIMIT else ""]
        for run, samples in found.items()
        for figure, (old, new, percent) in compared(samples).items()
    ]


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("compare", __doc__, "flags", "json")
    parser.add_argument("old", metavar="OLD", help="commit or folder")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="values of the engine's --model")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args(argv)
    found = {}
    with folder_of(args.old) as old:
        for model in args.models:
            found[model] = uvloop.run(compare(args, model, old))
    rows = [row for model, runs in found.items() for row in rows_of(model, runs)]
    print(table(["model", "run", "figure", args.old, "new", "gain", ""], rows))
    write_result(args, result=found)
    sys.exit(any(is_loss(samples) for runs in found.values() for samples in runs.values()))
