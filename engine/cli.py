"""The command `mini-vlm`: `serve` is `python -m engine.serve`, `plan` its `--plan`, `bench NAME` is `python -m bench.NAME`."""

import argparse
import runpy
import sys

from engine.launch.config import VERSION

BENCHMARKS = (
    "probe", "load", "multiturn", "accuracy", "kernels", "gaps", "replicas", "proxy", "tokens", "overload", "soak", "faults", "drafts",
    "inside", "video",
)  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("mini-vlm", description="A small serving engine for vision-language models.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="serve a model: flags of `python -m engine.serve`", add_help=False)
    commands.add_parser("plan", help="what fits on which GPU: the same flags", add_help=False)
    bench = commands.add_parser("bench", help="measure a server: flags of `python -m bench.NAME`")
    bench.add_argument("name", choices=BENCHMARKS)
    argv = sys.argv[1:] if argv is None else argv
    num_own = 2 if argv[:1] == ["bench"] else 1
    args = parser.parse_args(argv[:num_own])
    module = f"bench.{args.name}" if args.command == "bench" else "engine.serve"
    own = ["--plan"] if args.command == "plan" else []
    sys.argv = [f"mini-vlm {' '.join(argv[:num_own])}", *own, *argv[num_own:]]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
