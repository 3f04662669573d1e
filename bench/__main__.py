"""Run a benchmark: `python -m bench NAME [FLAGS]`. Without a name, list them."""

import sys
from importlib import import_module

from bench import BENCHMARKS


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in BENCHMARKS:
        is_question = not argv or argv[0] in ("-h", "--help")
        print("usage: python -m bench NAME [FLAGS]; NAME --help shows the flags\n")
        print("\n".join(f"  {name:10}{text}" for name, text in BENCHMARKS.items()))
        sys.exit(None if is_question else f"\nthere is no benchmark {argv[0]}")
    sys.argv = [f"bench {argv[0]}", *argv[1:]]
    import_module(f"bench.{'probe' if argv[0] == 'images' else argv[0]}").main()


if __name__ == "__main__":
    main()
