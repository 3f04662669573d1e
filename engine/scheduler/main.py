"""The scheduler process: requests in, plans out, results in, tokens out. `python -m engine.scheduler.main RUNTIME.json`.

    inbox ──▶ receive ──▶ [policy.plan ──▶ workers] up to two steps ahead ──▶ results of all ranks ──▶ land ──▶ processor
"""

import logging
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from engine.ipc import Child, Inbox, Outbox
from engine.messages import (
    PROCESSOR_ARENA,
    Abort,
    EngineOutputs,
    EngineRequest,
    EngineStats,
    ErrorInfo,
    FinishReason,
    RequestOutput,
    StepPlan,
    StepResult,
    ToScheduler,
    WorkerReady,
)
from engine.scheduler import policy
from engine.scheduler.blocks import BlockHasher, BlockPool
from engine.scheduler.images import ImageDirectory
from engine.scheduler.policy import Limits, PlannedStep, State
from engine.scheduler.request import Request, Status
from models.config import ModelConfig

logger = logging.getLogger(__name__)

DEPTH = 2  # plans in flight: one runs, one waits behind it
HEARTBEAT_S = 1.0


@dataclass(slots=True)
class InFlight:
    """A plan that was sent, until every rank's result is in."""

    step: PlannedStep
    results: list[StepResult] = field(default_factory=list)


class Scheduler:
    """Owns every decision. Single-threaded; `run` is its loop."""

    def __init__(self, child: Child, eos_token_ids: frozenset[int]):
        self._config = child.config
        self._child = child
        self._eos_token_ids = eos_token_ids
        self._arena = child.arena_view(PROCESSOR_ARENA)
        self._inbox: Inbox[ToScheduler] = Inbox(child.run_dir, "scheduler", ToScheduler)
        self._processor: Outbox[EngineOutputs] = Outbox(child.run_dir, "processor")
        self._workers: list[Outbox[StepPlan]] = [Outbox(child.run_dir, f"worker-{rank}") for rank in range(child.config.tp)]
        self._encoder = msgspec.msgpack.Encoder()
        self._requests: dict[int, Request] = {}
        self._in_flight: deque[InFlight] = deque()
        self._outputs: list[RequestOutput] = []
        self._released: list[int] = []
        self._num_arrived = self._num_prompt_tokens = self._num_generated = 0
        self._last_progress = self._last_heartbeat = 0.0
        self._checked = False
        self.stopping = threading.Event()
        self._state: State  # made when the workers have said how much they hold

    def run(self) -> None:
        """The loop: returns when `stopping` is set."""
        self._state = self._make_state(self._await_workers())
        self._child.ready(f"{self._state.blocks.num_blocks} KV blocks of {self._config.block_size} tokens")
        while not self.stopping.is_set():
            self._receive()
            while len(self._in_flight) < DEPTH and self._launch_step():
                pass
            self._flush()

    # ---- start -----------------------------------------------------------------------------------------------------------------------

    def _await_workers(self) -> list[WorkerReady]:
        ready: list[WorkerReady] = []
        while len(ready) < self._config.tp and not self.stopping.is_set():
            message = self._inbox.recv(timeout=HEARTBEAT_S)
            if isinstance(message, WorkerReady):
                ready.append(message)
        return ready or sys.exit(0)

    def _make_state(self, ready: list[WorkerReady]) -> State:
        config = self._config
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_mixed_tokens=config.max_num_mixed_tokens,
            max_num_encoder_tokens=config.max_num_encoder_tokens,
            bytes_per_image_token=ready[0].bytes_per_image_token,
            prefix_cache=config.prefix_cache,
        )
        blocks = BlockPool(min(worker.num_blocks for worker in ready), config.block_size)
        images = ImageDirectory(min(worker.image_cache_bytes for worker in ready))
        return State(limits, blocks, images, free_rows=list(range(config.max_num_seqs)))

    # ---- in --------------------------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Waits for a message and takes all that have come. After a quiet second with nothing to do, the state checks itself once."""
        message = self._inbox.recv(timeout=HEARTBEAT_S)
        if message is None and not self._requests and not self._checked:
            self._state.check()
        self._checked = message is None
        while message is not None:
            match message:
                case EngineRequest():
                    self._add(message)
                case Abort():
                    self._abort(message.rid)
                case StepResult():
                    self._collect(message)
                case WorkerReady():
                    raise AssertionError("a worker started twice")
            message = self._inbox.recv_ready()

    def _add(self, wire: EngineRequest) -> None:
        num_prompt = wire.prompt.length // 4
        problem = self._find_problem(wire, num_prompt)
        if problem is not None:
            error = ErrorInfo(400, problem, code="context_length_exceeded")
            self._outputs.append(RequestOutput(wire.rid, [], error=error))
            self._released.append(wire.rid)
            return
        capacity = min(self._child.runtime.max_model_len, self._state.blocks.num_blocks * self._config.block_size)
        wanted = wire.params.max_tokens
        max_tokens = min(capacity - num_prompt, wanted if wanted is not None else capacity)
        token_ids = np.empty(num_prompt + max_tokens, dtype=np.int32)
        token_ids[:num_prompt] = np.frombuffer(self._arena.view(wire.prompt.offset, wire.prompt.length), dtype=np.int32)
        hasher = BlockHasher(self._config.block_size, wire.images, wire.cache_salt)
        request = Request(wire, token_ids, num_prompt, max_tokens, self._eos_token_ids, hasher, self._num_arrived)
        self._num_arrived += 1
        self._num_prompt_tokens += num_prompt
        self._requests[wire.rid] = request
        self._state.waiting.append(request)

    def _find_problem(self, wire: EngineRequest, num_prompt: int) -> str | None:
        """Why a request could never run: what is refused here never loops in the policy."""
        capacity = self._state.blocks.num_blocks * self._config.block_size
        if num_prompt + 1 > capacity:
            return f"The prompt has {num_prompt} tokens; the KV pool holds {capacity}."
        limits = self._state.limits
        largest = min(limits.max_num_encoder_tokens, self._state.images.budget_bytes // limits.bytes_per_image_token)
        for span in wire.images:
            if span.length > largest:
                return f"An image takes {span.length} tokens; the largest that can be encoded takes {largest}."
        return None

    def _abort(self, rid: int) -> None:
        request = self._requests.get(rid)
        if request is not None and request.status is not Status.STOPPING:
            self._stop(request)
            self._release_if_landed(request)

    # ---- out -------------------------------------------------------------------------------------------------------------------------

    def _launch_step(self) -> bool:
        """Plans a step and sends it to every rank; False if nothing can run now."""
        step = policy.plan(self._state)
        if step is None:
            return False
        data = self._encoder.encode(step.plan)
        for worker in self._workers:
            worker.send_bytes(data)
        self._in_flight.append(InFlight(step))
        now = time.monotonic()
        for request in step.requests:
            if request.wire.stages.admitted == 0.0:
                request.wire.stages.admitted = now
        if logger.isEnabledFor(logging.DEBUG):
            self._log_step(step, len(data))
        return True

    def _log_step(self, step: PlannedStep, num_bytes: int) -> None:
        plan = step.plan
        num_hit = len({ref.image_id for chunk in plan.chunks for ref in chunk.visual} - step.encoded.keys())
        logger.debug(
            "step %d: %d new tokens in %d rows, %d images encoded, %d images hit, plan of %d bytes",
            plan.step, sum(chunk.length for chunk in plan.chunks), len(plan.chunks), len(plan.encodes), num_hit, num_bytes,
        )  # fmt: skip

    def _collect(self, result: StepResult) -> None:
        """Keeps a rank's result; lands the oldest steps that are complete, in order."""
        offset = result.step - self._in_flight[0].step.plan.step
        self._in_flight[offset].results.append(result)
        while self._in_flight and len(self._in_flight[0].results) == self._config.tp:
            self._land(self._in_flight.popleft())
            self._last_progress = time.monotonic()

    def _land(self, landed: InFlight) -> None:
        """A step is done on every rank: tokens to requests, contents to the caches, ends to clients."""
        step, results = landed.step, landed.results
        primary = next(result for result in results if result.rank == 0)
        for image_id in {image_id for result in results for image_id in result.failed_images}:
            self._fail_image(step.encoded[image_id])
        token_ids = iter(primary.token_ids)
        for request, chunk in zip(step.requests, step.plan.chunks, strict=True):
            token_id = next(token_ids) if chunk.sample else None
            request.num_in_flight -= 1
            self._note_stages(request, chunk.sample, results)
            if request.status is Status.STOPPING:
                self._release_if_landed(request)
                continue
            if request.status is Status.RUNNING:
                policy.commit(self._state, request, chunk.start + chunk.length)
            if token_id is not None:
                self._deliver(request, token_id)

    def _deliver(self, request: Request, token_id: int) -> None:
        """A drawn token goes to its request and to the client."""
        request.append(token_id)
        self._num_generated += 1
        first = request.num_known == request.num_prompt + 1
        if first:
            request.wire.stages.first_token = time.monotonic()
        reason = request.finish_reason_of(token_id)
        stages = request.wire.stages if first else None
        self._outputs.append(RequestOutput(request.rid, [token_id], reason, None, max(0, request.num_cached), stages))
        if reason is not None:
            self._stop(request, reason)
            self._release_if_landed(request)

    def _note_stages(self, request: Request, sampled: bool, results: list[StepResult]) -> None:
        stages = request.wire.stages
        if stages.first_token:
            return
        if stages.launched == 0.0:
            stages.launched = min(result.launched for result in results)
        stages.decode_ms += max(result.decode_ms for result in results)
        stages.encode_ms += max(result.encode_ms for result in results)
        stages.forward_ms += max(result.forward_ms for result in results)
        if sampled:
            stages.prefilled = max(result.done for result in results)

    def _fail_image(self, digest: bytes) -> None:
        """Every request that shares the image gets the client's error; its hash is forgotten."""
        error = ErrorInfo(422, "An image could not be decoded.", code="invalid_image")
        for request in list(self._requests.values()):
            shared = {i for i in request.pins if request.images[i].hash == digest}
            for index in shared:
                self._state.images.unpin(digest)
                request.pins.discard(index)
            if request.status is not Status.STOPPING and any(span.hash == digest for span in request.images):
                self._outputs.append(RequestOutput(request.rid, [], error=error))
                self._stop(request)
                self._release_if_landed(request)
        self._state.images.forget(digest)

    def _stop(self, request: Request, reason: FinishReason = "abort") -> None:
        """No further chunks; resources go when its plans in flight have landed."""
        (self._state.waiting if request.status is Status.WAITING else self._state.running).remove(request)
        request.status = Status.STOPPING
        request.finish = reason
        self._state.stopping.add(request)

    def _release_if_landed(self, request: Request) -> None:
        if request.num_in_flight == 0:
            policy.release(self._state, request)
            self._state.stopping.discard(request)
            del self._requests[request.rid]
            self._released.append(request.rid)

    def _flush(self) -> None:
        """Sends what has gathered, and a heartbeat with statistics once a second."""
        now = time.monotonic()
        if not self._in_flight:
            self._last_progress = now
        beat = now - self._last_heartbeat >= HEARTBEAT_S or (not self._requests and bool(self._released))
        if not (self._outputs or self._released or beat):
            return
        stats = self._stats() if beat else None
        self._last_heartbeat = now if beat else self._last_heartbeat
        self._processor.send(EngineOutputs(self._outputs, self._released, stats, self._last_progress))
        self._outputs, self._released = [], []

    def _stats(self) -> EngineStats:
        state, counters = self._state, self._state.counters
        return EngineStats(
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_blocks=state.blocks.num_blocks,
            num_free_blocks=state.blocks.num_free,
            num_pinned_images=state.images.num_pinned,
            image_cache_bytes=state.images.used_bytes,
            image_cache_budget=state.images.budget_bytes,
            steps=state.num_steps,
            prompt_tokens=self._num_prompt_tokens,
            generated_tokens=self._num_generated,
            images_evicted=state.images.num_evicted,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            computed_tokens=counters.computed_tokens,
            images_encoded=counters.images_encoded,
            images_hit=counters.images_hit,
            images_skipped=counters.images_skipped,
            preemptions=counters.preemptions,
        )


def main() -> None:
    """Entry point of the scheduler process."""
    child = Child.attach("scheduler")
    model = ModelConfig.from_folder(Path(child.runtime.model_folder))
    scheduler = Scheduler(child, frozenset(model.eos_token_ids))
    signal.signal(signal.SIGTERM, lambda *_: scheduler.stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    child.on_orphaned(scheduler.stopping.set)
    scheduler.run()


if __name__ == "__main__":
    main()
