"""Origin stored with every result, and tables and JSON files of results."""

import argparse
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "flashinfer-python", "triton", "nvidia-nvimgcodec-cu13", "pillow")


def environment(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Return hardware, versions and the command line of this machine, the client's and possibly the server's."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": " ".join(command or ["python", "-m", *module_command()]),
        "gpus": _gpus(),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
    }


def module_command() -> list[str]:
    """Return the command as typed: `bench images --flags`."""
    script = Path(sys.argv[0])
    return [*(sys.argv[0].split() if sys.argv[0].startswith("bench ") else [f"{script.parent.name}.{script.stem}"]), *sys.argv[1:]]


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_result(args: argparse.Namespace, **content: object) -> None:
    """Write `content`, its origin and all flags to the file of `--json`, if any."""
    if args.json:
        settings = {name: str(value) for name, value in vars(args).items()}
        write_json(args.json, {"environment": environment(), "settings": settings, **content})


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with aligned columns."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile (0-100), interpolated linearly. ValueError without values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()
