"""Engine whose worker ends if the launch of a step waits for the device: `python -m tests.gpu.asynchronous [command of engine.serve]`.

A wait keeps the next step's images from being encoded while the previous step runs.
"""

import sys

import torch

import engine.worker.main
from bench.processes import serve_with
from engine.wire.messages import StepPlan
from engine.worker.runner import LaunchedStep, Runner

PREFIX = (sys.executable, "-m", "tests.gpu.asynchronous")


def forbid_waits() -> None:
    launch = Runner.launch

    def checked(self: Runner, plan: StepPlan) -> LaunchedStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(self, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    Runner.launch = checked  # type: ignore[method-assign]


def main() -> int:
    """Entry point of the launcher, which gets the command that it replaces, or of the worker."""
    if not sys.argv[1].endswith(".json"):
        return serve_with("engine.worker.main", "tests.gpu.asynchronous", [], sys.argv[sys.argv.index("engine.serve") + 1 :])
    forbid_waits()
    engine.worker.main.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
