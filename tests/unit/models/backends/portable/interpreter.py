"""Triton's interpreter for tests of kernels: files that use it are run again in a process that has it on, see `conftest`."""

import importlib.util
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # has to be set before triton is imported, so in a process of its own
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that a test of this file starts")
starts_interpreter = pytest.mark.skipif(INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs triton")
UNUSED = ("langsmith_plugin", "schemathesis")  # plugins that take seconds to import


def run_interpreted(files: list[str]) -> None:
    """Runs the interpreted tests of `files`; AssertionError with their output if one fails, or if a file has none that ran."""
    without = [option for plugin in ("cacheprovider", *UNUSED) for option in ("-p", f"no:{plugin}")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-vv", "--noconftest", *without, *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    passed = [line for line in run.stdout.splitlines() if " PASSED" in line]
    all_ran = all(any(f"{os.path.basename(file)}::" in line for line in passed) for file in files)
    assert run.returncode == 0 and all_ran, run.stdout + run.stderr


def _remember_builtins() -> None:
    """For each call of a device function Triton searches all of its language for built-in functions: a third of the time.

    Their names do not change, so they are looked up once, before any is replaced; their values each time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    places = tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base
    names = {place: [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)] for place in places}

    def getmembers(place: object) -> list[tuple[str, object]]:
        return [(name, getattr(place, name)) for name in names[place]] if place in names else inspect.getmembers(place)

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})


if INTERPRETED:
    _remember_builtins()
