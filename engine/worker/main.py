"""Worker process: one rank of the model. `python -m engine.worker.main RUNTIME.json RANK`.

plan ──▶ launch (returns at once) ──▶ pending, at most DEPTH ──▶ done? ──▶ result
"""

import logging
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

import torch

from engine.wire.child import Child, StopFlag, settle_heap
from engine.wire.config import num_cpus
from engine.wire.ipc import Inbox, Outbox
from engine.wire.memory import read_model
from engine.wire.messages import DEPTH, StepPlan, StepResult, ToWorker, WorkerReady
from engine.worker.build import Handlers, build_runner
from engine.worker.failure import explain
from engine.worker.runner import LaunchedStep, Runner

logger = logging.getLogger(__name__)

PAUSE_S, IDLE_POLL_S = 0.02, 1.0  # time without a plan before spare time is used, and before a retry if there was no work
SLEEP_S, SPIN_S = 20e-6, 1e-3  # between looks at a step in flight; until the next plan


def run(
    runner: Runner,
    handlers: Handlers,
    plans: Inbox[ToWorker],
    results: Outbox[WorkerReady | StepResult],
    stopping: StopFlag,
) -> None:
    """Run the worker: launch a step while the previous one still runs; send results in order."""
    pending: deque[LaunchedStep] = deque()
    timeout_s = IDLE_POLL_S
    while not stopping.is_set():
        plan = plans.recv_ready() if pending else plans.recv(timeout_s, spin=SPIN_S if timeout_s == PAUSE_S else 0.0)
        if plan is not None:
            timeout_s = PAUSE_S
        if isinstance(plan, StepPlan):
            pending.append(runner.launch(plan))
        elif plan is not None:
            handlers[type(plan)](plan)
        if pending and (len(pending) == DEPTH or pending[0].watch.is_done()):
            results.send(pending.popleft().result())
        elif plan is None and not runner.use_spare_time(is_busy=bool(pending)):
            if pending:
                wait(pending[0])
            elif timeout_s < IDLE_POLL_S:
                timeout_s = IDLE_POLL_S
            else:
                runner.sampler.rules.load_early()


def wait(step: LaunchedStep) -> None:
    """Let other threads run before the next look at a step in flight. A verification's result decides the next plan, which a processor
    that has slept prepares and launches more slowly."""
    if step.samples.proposed is None:
        time.sleep(SLEEP_S)
    else:
        os.sched_yield()


def take_device(child: Child, rank: int) -> torch.device:
    if child.runtime.device == "cpu":
        torch.set_num_threads(max(1, num_cpus() // child.config.tp))
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # the default one cannot be captured, see `models.layers.repeats`
    return device


def main() -> None:
    rank = int(sys.argv[2])
    child = Child.attach(f"worker-{rank}")
    stopping = StopFlag()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    child.on_orphaned(stopping.set)
    plans: Inbox[ToWorker] = Inbox(child.run_dir, child.role, ToWorker)
    results: Outbox[WorkerReady | StepResult] = Outbox(child.run_dir, "scheduler")
    try:
        model_config = read_model(child.config, Path(child.runtime.model_folder), child.runtime.draft_folder)
        device = take_device(child, rank)
        runner, handlers, ready = build_runner(child, model_config, rank, device)
    except (ValueError, OSError, ImportError, RuntimeError) as problem:  # RuntimeError: memory, compilers, collectives
        logger.debug("the model could not be built", exc_info=problem)
        child.failed(explain(problem))
        os._exit(1)  # a compiler may still be running
    settle_heap()
    results.send(ready)
    try:
        run(runner, handlers, plans, results, stopping)
    except torch.OutOfMemoryError as problem:  # of one of several ranks
        child.failed(explain(problem))
        os._exit(1)
    os._exit(0)  # tearing down collectives may wait for ranks that have ended


if __name__ == "__main__":
    main()
