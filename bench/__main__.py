"""Run a benchmark: `python -m bench NAME [FLAGS]`. Without a name, list them."""

import runpy
import sys

from bench import BENCHMARKS


def main(argv: list[str] | None = None) -> None:
    """Run a benchmark by its name, or list all of them."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in BENCHMARKS:
        is_question = not argv or argv[0] in ("-h", "--help")
        print("usage: python -m bench NAME [FLAGS]; NAME --help shows the flags\n")
        print("\n".join(f"  {name:10}{text}" for name, (_, text) in BENCHMARKS.items()))
        sys.exit(None if is_question else f"\nthere is no benchmark {argv[0]}")
    module = BENCHMARKS[argv[0]][0]
    sys.argv = [f"bench {argv[0]}", *argv[1:]]
    runpy.run_module(module, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
