"""Measure every cell of a model's row in the published tables at one commit.

    python -m bench row Qwen3-VL-8B --store h200/8B
    python -m bench row Qwen3-VL-8B --flags "--backend portable" --store h200/8B-portable

Starts an engine, with dummy weights for a published size. A row takes two to five minutes; `--runs` measures a part.
`--store` replaces these runs in bench/results/GPU/MODEL.json; `bench tables` writes the pages.
"""

import argparse
import subprocess
import time
from typing import Any

import uvloop

from bench.compare import RUNS, figures, run_benchmark
from bench.flags import make_parser
from bench.processes import engine_flags, running_engine
from bench.report import table, write_result
from bench.tables import store

CELLS = RUNS | {
    "text": "load --concurrency 64 --requests 640 --warm-ups 64 --input-tokens 256 --output-tokens 256",
    "image": "load --concurrency 32 --requests 320 --warm-ups 32 --images 1 --output-tokens 128",
    "probe": RUNS["probe"].replace("--repeats 3", "--repeats 9"),  # a median of 3 differed by up to 4 % between two runs
}


def commit_of_clone() -> str:
    """Return the short hash of HEAD. RuntimeError if tracked files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    if commit.endswith("-dirty"):
        raise RuntimeError("commit the clone's changes, or pass --commit")
    return commit


async def measure(args: argparse.Namespace, origin: dict[str, str]) -> None:
    found: dict[str, Any] = {}
    async with running_engine(engine_flags(args.model, args.flags)) as (_, url):
        for run in args.runs:
            found[run] = await run_benchmark(CELLS[run], url, args.seed)
            print(table(["run", "figure", "value"], [[run, name, f"{value:.4g}"] for name, value in figures(run, found[run]).items()]))
            if args.store:
                store(args.store, {run: origin | found[run]})
            write_result(args, **origin, result=found)  # the next run may be cut off


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("row", __doc__, "flags", "seed", "json")
    parser.add_argument("model", metavar="MODEL", help="value of the engine's --model")
    parser.add_argument("--store", metavar="GPU/MODEL", help="file of bench/results to update")
    parser.add_argument("--commit", help="commit of this version; default: that of the clone, which must have no changes")
    parser.add_argument("--runs", nargs="+", choices=CELLS, default=[*CELLS], help="default: all")
    args = parser.parse_args(argv)
    uvloop.run(measure(args, {"commit": args.commit or commit_of_clone(), "date": time.strftime("%Y-%m-%d")}))
