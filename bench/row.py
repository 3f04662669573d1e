"""Measure every cell of a model's row in the published tables in one run, at one commit.

    python -m bench row Qwen3-VL-8B --store h200/8B
    python -m bench row Qwen3-VL-8B --flags "--backend portable" --store h200/8B-portable

Starts an engine, with dummy weights for a published size, and runs the probe, one stream, 64 text streams and 32 image streams against it.
A row takes about five minutes. `--store GPU/MODEL` replaces these runs in
bench/results/GPU/MODEL.json; `python -m bench tables` then writes the pages.
"""

import argparse
import subprocess
import time
from typing import Any

import uvloop

from bench.compare import RUNS, engine_flags, figures, run_benchmark
from bench.faults import engine
from bench.flags import make_parser
from bench.report import table, write_result
from bench.tables import store

CELLS = RUNS | {
    "text": "load --concurrency 64 --requests 640 --warm-ups 64 --input-tokens 256 --output-tokens 256",
    "image": "load --concurrency 32 --requests 320 --warm-ups 32 --images 1 --output-tokens 128",
    "images4": "load --concurrency 16 --requests 96 --warm-ups 16 --images 4 --output-tokens 64",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("row", __doc__, "seed", "json")
    parser.add_argument("model", metavar="MODEL", help="value of the engine's --model")
    parser.add_argument("--flags", default="", help="further flags of the engine, as one string")
    parser.add_argument("--store", metavar="GPU/MODEL", help="file of bench/results to update")
    parser.add_argument("--commit", help="commit of this version; default: that of the clone, which must have no changes")
    return parser.parse_args(argv)


def commit_of_clone() -> str:
    """Return the short hash of HEAD. RuntimeError if tracked files differ from it."""
    if subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True).stdout:
        raise RuntimeError("the clone has changes: commit them, or name the version with --commit")
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


async def measure_row(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the results of each benchmark."""
    async with engine(engine_flags(args.model, args.flags)) as (_, url):
        return {run: await run_benchmark(command, url, args.seed) for run, command in CELLS.items()}


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    args = parse_args(argv)
    origin = {"commit": args.commit or commit_of_clone(), "date": time.strftime("%Y-%m-%d")}
    found = uvloop.run(measure_row(args))
    rows = [[run, name, f"{value:.4g}"] for run, content in found.items() for name, value in figures(run, content).items()]
    print(table(["run", "figure", "value"], rows))
    if args.store:
        store(args.store, {run: [origin | content] for run, content in found.items()})
    write_result(args, **origin, result=found)


if __name__ == "__main__":
    main()
