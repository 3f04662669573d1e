"""The command `mini-vlm`: `serve` is `python -m engine.serve`, `plan` its `--plan`, `bench NAME` is `python -m bench NAME`."""

import argparse
import runpy
import sys

from engine.wire.config import VERSION


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("mini-vlm", description="A small serving engine for vision-language models.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="serve a model: flags of `python -m engine.serve`", add_help=False)
    commands.add_parser("plan", help="what fits on which GPU: the same flags", add_help=False)
    commands.add_parser("bench", help="run a benchmark: `mini-vlm bench` lists them", add_help=False)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv[:1])
    own = ["--plan"] if args.command == "plan" else []
    sys.argv = [f"mini-vlm {args.command}", *own, *argv[1:]]
    runpy.run_module("bench" if args.command == "bench" else "engine.serve", run_name="__main__")


if __name__ == "__main__":
    main()
