"""Triton's interpreter for tests of kernels: a file that uses it runs itself again in a process that has it on."""

import importlib.util
import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # has to be set before triton is imported, so in a process of its own
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that a test of this file starts")
starts_interpreter = pytest.mark.skipif(INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs triton")


def run_interpreted(file: str) -> None:
    """Runs the interpreted tests of `file`; AssertionError with their output if one fails."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout + run.stderr
