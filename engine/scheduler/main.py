"""Scheduler process: requests in, plans out, results in, tokens out.

inbox ──▶ receive ──▶ [next_step ──▶ workers] up to `core.depth` steps ahead ──▶ results of all ranks ──▶ processor
"""

import logging
import math
import signal
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from engine.scheduler.adapters import AdapterDirectory
from engine.scheduler.blocks import BlockPool
from engine.scheduler.core import SchedulerCore
from engine.scheduler.drafts import make_drafter
from engine.scheduler.images import ImageDirectory
from engine.scheduler.policy import PlannedStep
from engine.scheduler.state import Limits, State
from engine.scheduler.updates import UpdateControl
from engine.wire.adapters import AdapterRead, ReadAdapter
from engine.wire.child import Child, StopFlag, map_large_blocks
from engine.wire.config import EngineConfig
from engine.wire.ipc import Inbox, Outbox
from engine.wire.messages import (
    PROCESSOR_ARENA,
    Abort,
    EngineOutputs,
    EngineRequest,
    Forget,
    Pixels,
    Region,
    StepPlan,
    StepResult,
    ToScheduler,
    WorkerReady,
)
from engine.wire.updates import UPDATES_INBOX, Order, OrderDone, OrderResult
from models.config.huggingface import read_config

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
MAX_STEP_S = {"cuda": 30.0, "cpu": 600.0}  # that a step may take before it is no progress
SPIN_S = {"cuda": 0.02, "cpu": 0.0}  # longer than a verification


class Scheduler:
    def __init__(self, child: Child, eos_token_ids: frozenset[int]):
        self.stopping = StopFlag()
        self._child = child
        self._eos_token_ids = eos_token_ids
        self._arena = child.arena_view(PROCESSOR_ARENA)
        self._inbox: Inbox[ToScheduler] = Inbox(child.run_dir, "scheduler", ToScheduler)
        self._processor: Outbox[EngineOutputs] = Outbox(child.run_dir, "processor")
        self._api: Outbox[OrderDone] = Outbox(child.run_dir, UPDATES_INBOX)
        self._workers: list[Outbox[StepPlan]] = [Outbox(child.run_dir, f"worker-{rank}") for rank in range(child.config.tp)]
        self._encoder = msgspec.msgpack.Encoder()
        self._spin_s = SPIN_S[child.runtime.device]
        self._max_step_s = min(MAX_STEP_S[child.runtime.device], child.config.wedge_timeout or math.inf)
        self._last_heartbeat = 0.0

    def run(self) -> None:
        ready = self._await_workers()
        if ready is None:
            return
        core = self._make_core(ready)
        control = UpdateControl(core, self._child.config.tp, self._send_workers, self._api.send)
        self._child.ready(f"{core.state.blocks.num_blocks} KV blocks of {core.state.blocks.block_size} tokens")
        while not self.stopping.is_set():
            if core.num_in_flight:
                self._flush(core, control)  # the device is busy: serve clients first
            while core.num_in_flight < core.depth and (step := core.next_step()) is not None:
                self._send(step)
            for order in core.state.adapters.take_reads():
                self._send_workers(order)
            core.expire(time.monotonic())
            self._flush(core, control)
            self._receive(core, control)
            control.advance()

    def _await_workers(self) -> list[WorkerReady] | None:
        ready: list[WorkerReady] = []
        while len(ready) < self._child.config.tp:
            if self.stopping.is_set():
                return None
            if isinstance(message := self._inbox.recv(timeout=HEARTBEAT_S), WorkerReady):
                ready.append(message)
        return ready

    def _make_core(self, ready: list[WorkerReady]) -> SchedulerCore:
        config = self._child.config
        blocks = BlockPool(min(worker.num_blocks for worker in ready), config.block_size, config.snapshot_share)
        images = ImageDirectory(min(worker.image_cache_bytes for worker in ready))
        limits = make_limits(config, ready[0])
        adapters, rows = AdapterDirectory(config.num_adapter_slots, config.tp), list(range(config.max_num_seqs))
        state = State(limits, blocks, images, adapters, free_rows=rows)
        proposer = make_drafter(config.draft, limits.step_sizes.verify_rows)
        longest, ends = self._child.runtime.max_model_len, self._eos_token_ids
        return SchedulerCore(state, config.tp, longest, ends, proposer)

    def _receive(self, core: SchedulerCore, control: UpdateControl) -> None:
        spin = self._spin_s if 0 < core.num_in_flight < core.depth else 0.0  # then a result is awaited for the next plan
        message = self._inbox.recv_ready() or self._inbox.recv(timeout=HEARTBEAT_S, spin=spin)
        while message is not None:
            match message:
                case EngineRequest():
                    core.add(message, self._ids(message.prompt))
                case Pixels() | AdapterRead():
                    core.take(message)
                case Abort():
                    core.abort(message.rid, message.index)
                case Forget():
                    core.forget_all(message.images)
                case StepResult():
                    core.collect(message)
                case Order() | OrderResult():
                    control.take(message)
                case WorkerReady():
                    raise AssertionError("a worker started twice")
            message = self._inbox.recv_ready()

    def _ids(self, region: Region) -> npt.NDArray[np.int32]:
        return np.frombuffer(self._arena.view(region.offset, region.length), dtype=np.int32)

    def _send(self, step: PlannedStep) -> None:
        plan = step.plan
        self._send_workers(plan)
        if logger.isEnabledFor(logging.DEBUG):
            num_tokens = sum(chunk.length for chunk in plan.chunks)
            logger.debug("step %d: %d tokens in %d chunks, %d images encoded", plan.step, num_tokens, len(plan.chunks), len(plan.encodes))

    def _send_workers(self, message: StepPlan | ReadAdapter | Order) -> None:
        data = self._encoder.encode(message)
        for worker in self._workers:
            worker.send_bytes(data)

    def _flush(self, core: SchedulerCore, control: UpdateControl) -> None:
        """Send outputs; once per second, or when all requests are done, also statistics."""
        now = time.monotonic()
        beat = now - self._last_heartbeat >= HEARTBEAT_S or (core.has_outputs and not core.num_requests)
        if beat:
            self._last_heartbeat = now
        if beat or core.has_outputs:
            progress = min(core.alive_at(now), control.alive_at(now))
            alive = now if now - progress < self._max_step_s else progress
            self._processor.send(core.take_outputs(core.stats() if beat else None, alive))


def make_limits(config: EngineConfig, worker: WorkerReady) -> Limits:
    sizes = worker.step_sizes
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_mixed_tokens=config.max_num_mixed_tokens,
        max_num_encoder_tokens=config.max_num_encoder_tokens,
        mixed_step_tokens=sizes.usual,
        bytes_per_image_token=worker.bytes_per_image_token,
        step_sizes=sizes,
        prefix_cache=config.prefix_cache,
        snapshot_blocks=worker.snapshot_blocks,
        num_lookahead=config.max_drafts if config.draft in ("mtp", "eagle3") else 0,
    )


def main() -> None:
    child = Child.attach("scheduler")
    map_large_blocks()
    model = read_config(Path(child.runtime.model_folder))
    scheduler = Scheduler(child, frozenset(model.eos_token_ids))
    signal.signal(signal.SIGTERM, lambda *_: scheduler.stopping.set())
    child.on_orphaned(scheduler.stopping.set)
    scheduler.run()


if __name__ == "__main__":
    main()
