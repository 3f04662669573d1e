"""Compares versions of the engine, or sets of flags, on one machine: all are up at once and are measured in turn.

    git worktree add /tmp/old COMMIT
    python -m bench.turns --flags "--model Qwen3-VL-8B --load-format dummy --gpu-memory-utilization 0.45" --engines old=/tmp/old new=. \\
        --runs "one: load --concurrency 1 --requests 3" "probe: probe --content smooth --resolutions 720p --counts 1,8" --out out

Each run is a name and one of our benchmarks, which are of this clone; only the engines are of the given folders. Every second round begins
with the last engine. Prints medians over the rounds, and the last engine's difference; `out/NAME/RUN-ROUND.json` holds what the benchmarks
wrote. With one engine it is a way to measure several things after one start.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from bench.faults import engine
from bench.report import table

LOAD_FIGURES = ("requests_per_s", "output_tokens_per_s", "ttft_ms", "tpot_ms")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.turns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flags", default="", help="of every engine, as one string")
    parser.add_argument("--engines", nargs="+", default=["new=."], metavar="NAME=FOLDER[ FLAGS]", help="clones, with further flags of each")
    parser.add_argument("--runs", nargs="+", required=True, metavar="NAME: BENCHMARK FLAGS", help="without --url and --json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="a folder for all numbers")
    return parser.parse_args(argv)


def figures(content: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values of what a benchmark found: medians and rates of loads, times to first token, and all numbers in rows."""
    for name in LOAD_FIGURES:
        value = content.get("result", {}).get(name)
        if value is not None:
            yield name, value["p50"] if isinstance(value, dict) else value
    for point in content.get("points", []):
        if "error" not in point:
            yield f"{point['resolution']} x {point['images']}, ttft_ms", point["ttft_sent_ms"]
    for row in content.get("rows", []):
        label, *_ = row.values()
        yield from ((f"{label}, {name}", value) for name, value in row.items() if isinstance(value, int | float))


async def measure(run: str, url: str, to: Path) -> dict[str, float]:
    """One run of a benchmark against one engine. RuntimeError with its last words if it fails."""
    module, *flags = shlex.split(run)
    command = [sys.executable, "-m", f"bench.{module}", "--url", url, "--json", str(to), *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"bench.{run} fails: {output.decode()[-2000:]}")
    return dict(figures(json.loads(to.read_text(encoding="utf-8"))))


async def compare(args: argparse.Namespace) -> list[list[str]]:
    """Rows of the table: run and figure, a median for each engine, and by how many percent the last differs from the first."""
    found: defaultdict[tuple[str, str], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    async with contextlib.AsyncExitStack() as running:
        urls = {}
        for name, where in (text.split("=", 1) for text in args.engines):
            folder, *flags = shlex.split(where)
            _, urls[name] = await running.enter_async_context(engine([*shlex.split(args.flags), *flags], folder=Path(folder).absolute()))
        for number in range(1, args.rounds + 1):
            for name, url in list(urls.items())[:: 1 if number % 2 else -1]:
                for label, run in (text.split(":", 1) for text in args.runs):
                    for figure, value in (await measure(run, url, args.out / name / f"{label}-{number}.json")).items():
                        found[label, figure][name].append(value)
    rows = []
    for (label, figure), values in found.items():
        medians = [statistics.median(values[name]) for name in urls]
        change = f"{100 * (medians[-1] / medians[0] - 1):+.1f} %" if medians[0] else "-"
        rows.append([label, figure, *(f"{median:.4g}" for median in medians), *[change][: len(medians) - 1]])
    return rows


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    args = parse_args(argv)
    names = [text.split("=", 1)[0] for text in args.engines]
    print(table(["run", "figure", *names, *["difference"][: len(names) - 1]], uvloop.run(compare(args))))


if __name__ == "__main__":
    main()
