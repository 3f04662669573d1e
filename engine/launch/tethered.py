"""Start a module that ends with its parent, on its own CPUs: `engine.launch.tethered PARENT_PID CPU,CPU,... MODULE ARGUMENT...`.

A `preexec_fn` could not do this: it may wait forever for a lock that another thread of the parent holds."""

import os
import runpy
import signal
import sys

from engine.wire.child import die_with_parent
from engine.wire.config import python_command


def command(cpus: frozenset[int], module: str, *arguments: str) -> list[str]:
    return python_command("engine.launch.tethered", str(os.getpid()), ",".join(map(str, sorted(cpus))), module, *arguments)


def main() -> None:
    parent, cpus, module = sys.argv[1:4]
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # the parent has already ended
        sys.exit(1)
    os.sched_setaffinity(0, map(int, cpus.split(",")))
    sys.argv[1:4] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
