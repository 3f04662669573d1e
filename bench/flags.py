"""Command-line flags that benchmarks share."""

import argparse
from pathlib import Path
from typing import Any

FLAGS: dict[str, dict[str, Any]] = {
    "url": {"default": "http://127.0.0.1:8000", "help": "address of the server; default: %(default)s"},
    "model": {"help": "default: the first model that the server lists"},
    "api-key": {"help": "bearer token of the server"},
    "duration": {"type": float, "help": "seconds; default: %(default)s"},
    "pid": {"type": int, "help": "process id of the launcher, if it runs on this machine: memory is reported too"},
    "seed": {"type": int, "default": 0, "help": "another seed sends other images and texts; default: %(default)s"},
    "json": {"type": Path, "help": "write all numbers to this file"},
}
SERVER = ("url", "model", "api-key", "seed", "json")


def make_parser(name: str, description: str | None, *flags: str, **defaults: object) -> argparse.ArgumentParser:
    """Return a parser of `python -m bench NAME` with some of the flags of FLAGS."""
    parser = argparse.ArgumentParser(f"bench {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in flags:
        parser.add_argument(f"--{flag}", **FLAGS[flag])
    parser.set_defaults(**defaults)
    return parser
