"""Command-line flags that benchmarks share."""

import argparse
from pathlib import Path
from typing import Any

from bench.pictures import QUALITY, RESOLUTIONS

FLAGS: dict[str, dict[str, Any]] = {
    "url": {"default": "http://127.0.0.1:8000", "help": "address of the server; default: %(default)s"},
    "model": {"help": "default: the first model that the server lists"},
    "api-key": {"help": "bearer token of the server"},
    "duration": {"type": float, "help": "seconds; default: %(default)s"},
    "pid": {"type": int, "help": "process id of the launcher, if it runs on this machine: reports memory or CPU time of its processes"},
    "seed": {"type": int, "default": 0, "help": "another seed sends other images and texts; default: %(default)s"},
    "json": {"type": Path, "help": "write all numbers to this file"},
    "flags": {"default": "", "help": "further flags of the engine, as one string"},
    "concurrency": {"type": int, "help": "concurrent clients; default: %(default)s"},
    "resolution": {"choices": list(RESOLUTIONS), "default": "720p", "help": "resolution of the images; default: %(default)s"},
    "content": {"choices": list(QUALITY), "help": "kind of JPEG (bench/pictures.py); default: %(default)s"},
    "output-tokens": {"type": int, "help": "default: %(default)s"},
}
SERVER = ("url", "model", "api-key", "seed", "json")


def make_parser(name: str, description: str | None, *flags: str, **defaults: object) -> argparse.ArgumentParser:
    """Return a parser of `python -m bench NAME` with some of the flags of FLAGS."""
    parser = argparse.ArgumentParser(f"bench {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in flags:
        parser.add_argument(f"--{flag}", **FLAGS[flag])
    parser.set_defaults(**defaults)
    return parser
