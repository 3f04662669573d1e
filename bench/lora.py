"""Compare an engine without `--lora-modules` and one with it: requests without an adapter, with one adapter, and with 16 at once.

    python -m bench lora --model Qwen3-VL-8B --json lora.json

Both engines share the device; published sizes get dummy weights, and the adapters are random. On a card with less than 100 GiB pass
`--flags "--kv-cache-memory-bytes 6G --image-cache-bytes 1G"`. `x` is relative to the first engine.
"""

import argparse
import contextlib
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import uvloop

from bench.compare import FIGURE, RUNS, figures, run_benchmark
from bench.flags import make_parser
from bench.processes import engine_flags, running_engine
from bench.report import table, write_result
from models.config.hub import resolve
from models.config.huggingface import read_config
from models.scaffold.adapters import write_adapter

COUNT = 16  # adapters
CASES = {  # engine, run, number of adapters
    "base, one stream": ("base", "one", 0),
    "enabled, one stream": ("lora", "one", 0),
    "one adapter, one stream": ("lora", "one", 1),
    "base, 64 streams": ("base", "text", 0),
    "enabled, 64 streams": ("lora", "text", 0),
    "one adapter, 64 streams": ("lora", "text", 1),
    f"{COUNT} adapters, 64 streams": ("lora", "text", COUNT),
}


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    model = read_config(resolve(args.model, "dummy" if not Path(args.model).is_dir() else "auto", folder).folder)
    names = [f"adapter-{i}" for i in range(COUNT)]
    paths = [write_adapter(folder / name, model, i, args.rank, strength=0.1, dtype=torch.bfloat16) for i, name in enumerate(names)]
    modules = [f"{name}={path}" for name, path in zip(names, paths, strict=True)]
    flags = engine_flags(args.model, args.flags)
    slots = ["--max-loras", str(COUNT), "--max-lora-rank", str(max(args.rank, args.max_rank)), "--lora-modules", *modules]
    found: dict[str, list[float]] = defaultdict(list)
    async with contextlib.AsyncExitStack() as running:
        urls = {
            name: (await running.enter_async_context(running_engine([*flags, *more])))[1] for name, more in (("base", []), ("lora", slots))
        }
        for number in range(args.rounds):
            for case, (engine, run, count) in CASES.items():
                command = f"{RUNS[run]} --model {','.join(names[:count])}" if count else RUNS[run]
                sample = figures(run, await run_benchmark(command, urls[engine], number + 1))
                found[case].append(sample[FIGURE[run]])
                print(case, sample, flush=True)
    return dict(found)


def rows_of(found: dict[str, list[float]]) -> list[list[Any]]:
    medians = {case: statistics.median(values) for case, values in found.items()}
    base = {run: medians[case] for case, (engine, run, _) in CASES.items() if engine == "base"}
    return [[case, FIGURE[run], f"{medians[case]:.4g}", f"{medians[case] / base[run]:.3f}"] for case, (_, run, _) in CASES.items()]


def main() -> None:
    parser = make_parser("lora", __doc__, "flags", "json")
    parser.add_argument("--model", default="Qwen3-VL-8B", help="value of the engine's --model; default: %(default)s")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters; default: %(default)s")
    parser.add_argument("--max-rank", type=int, default=64, help="maximum rank of the adapter slots; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-lora-") as folder:
        found = uvloop.run(measure(args, Path(folder)))
    print(table(["case", "figure", "value", "x"], rows_of(found)))
    write_result(args, result=found)
