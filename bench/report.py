"""Origin stored with every result, and results as tables, JSON files and percentiles."""

import argparse
import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("torch", "transformers", "flashinfer-python", "triton", "nvidia-nvimgcodec-cu13", "pillow")
PERCENTILES = (50, 90, 99)


def environment() -> dict[str, Any]:
    """Return hardware, versions and the command line of this process without the output file, address and key."""
    program = sys.argv[0] if sys.argv[0].startswith("bench ") else f"bench.{Path(sys.argv[0]).stem}"
    command = " ".join(["python -m", program, *sys.argv[1:]])
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    return {
        "command": re.sub(r" --(json|url|api-key) \S+", "", command),
        "gpus": _gpus(),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "versions": {package: installed[package] for package in PACKAGES if package in installed},
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_result(args: argparse.Namespace, **content: object) -> None:
    """Write `content`, its origin and the flags to the file of `--json`, if any."""
    if args.json:
        settings = {name: str(value) for name, value in vars(args).items() if name not in ("json", "url", "api_key")}
        write_json(args.json, {"environment": environment(), "settings": settings, **content})


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def percentiles_ms(seconds: Sequence[float], *more: int) -> dict[str, float]:
    """Return percentiles in milliseconds; `p100` is the largest value."""
    return {f"p{q}": round(1e3 * float(np.percentile(seconds, q)), 3) for q in (*PERCENTILES, *more)}


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()
