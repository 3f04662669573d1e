"""One step on the device: evict, admit, encode, forward, sample. Nothing here waits for the device: a launched step is a handle that is
polled later."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from engine.wire.arena import ArenaView
from engine.wire.messages import ErrorInfo, StepPlan, StepResult
from engine.worker.adapters import WorkerAdapters
from engine.worker.graphs import StepGraphs
from engine.worker.images import Encoded, ImageCache
from engine.worker.rows import HostStep, Rows
from engine.worker.sampling.reports import NOTHING_READ, Readings
from engine.worker.sampling.sampler import Sampled, Sampler
from engine.worker.sampling.samples import HostSamples, Samples
from engine.worker.staging import Staging
from engine.worker.stopwatch import Stopwatch
from models.decoders.contract import LanguageModel
from models.kernels.paged import AttentionBackend
from models.parallel.group import TensorParallel

logger = logging.getLogger(__name__)

NOTHING_SAMPLED = Sampled(torch.empty(0, dtype=torch.int64), None)
NO_SAMPLES = HostSamples.empty()


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A launched step. `sampled` is valid once `watch` is done."""

    step: int
    rank: int
    launched: float
    sampled: Sampled  # in pinned host memory, as `readings`
    readings: Readings
    encoded: Encoded  # its pixels belong to the reader's stream: kept until the step is done
    watch: Stopwatch
    is_late: bool = False
    out_of_memory: bool = False
    failed_samples: dict[int, ErrorInfo] = field(default_factory=dict)
    samples: HostSamples = NO_SAMPLES
    proposed: Sequence[Sequence[int]] = ()  # by sampled chunk, as `sampled`: see `StepResult`

    def result(self) -> StepResult:
        self.watch.wait()
        token_ids, logprobs = self.sampled.tokens_S.tolist() if self.rank == 0 else [], self.sampled.logprobs_per_sample()
        num_tokens: list[int] = []
        if token_ids and self.samples.proposed is not None:
            kept = [*self.samples.kept(token_ids)]
            token_ids, logprobs = ([values[i] for run in kept for i in run if values] for values in (token_ids, logprobs))
            num_tokens = [len(run) for run in kept]
        return StepResult(
            rank=self.rank,
            step=self.step,
            token_ids=token_ids,
            num_tokens=num_tokens,
            failed_images=self.encoded.failed,
            launched=self.launched,
            done=time.monotonic(),
            decode_ms=self.encoded.read_ms,
            encode_ms=sum(watch.elapsed_ms() for watch in self.encoded.watches),
            forward_ms=self.watch.elapsed_ms(),
            is_late=self.is_late,
            logprobs=logprobs,
            reports={} if self.rank else self.readings.by_chunk(),
            out_of_memory=self.out_of_memory,
            failed_samples=self.failed_samples,
            proposed=[] if self.rank else [*map(list, self.proposed)],
        )


class Head(Protocol):
    def run(self, step: HostStep, tokens_S: torch.Tensor, rows_S: torch.Tensor, count: int) -> torch.Tensor:
        """Return (S, count) tokens after each sample. The step's hidden states are in `Rows.hidden_TX`; `rows_S`: see `Rows.deliver`."""


@dataclass(eq=False, repr=False)
class Runner:
    model: LanguageModel
    attention: AttentionBackend
    rows: Rows
    sampler: Sampler
    images: ImageCache
    staging: Staging
    graphs: StepGraphs | None
    prompts: ArenaView
    tp: TensorParallel
    head: Head | None = None
    adapters: WorkerAdapters | None = None

    def __post_init__(self) -> None:
        self._on_gpu = self.rows.last_tokens.is_cuda

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue a step and return at once (on a GPU). The memory plan covers every step; if another program takes the memory, a single
        rank abandons the step, one of several raises torch.OutOfMemoryError: the others wait in a collective."""
        launched = time.monotonic()
        if self.adapters is not None:
            self.adapters.load(plan.loads)
        self.images.evict(plan.evict)
        for admit in plan.admits:
            region = admit.prompt
            ids = self.rows.admit(admit, np.frombuffer(self.prompts.view(region.offset, region.length), dtype=np.int32))
            self.sampler.admit(admit.row, admit.params, ids, region.length // ids.itemsize)
            self.sampler.rules.admit(admit, self.prompts if self.tp.rank == 0 else None)
        self.rows.take_blocks(plan.chunks)
        try:
            return self._compute(plan, launched)
        except torch.OutOfMemoryError:
            if self.tp.size > 1:
                raise
            return self._give_up(plan, launched)

    def _compute(self, plan: StepPlan, launched: float) -> LaunchedStep:
        encoded = self.images.encode(plan.encodes)
        watch = Stopwatch(self._on_gpu)
        step = self.rows.build(plan.admits, plan.chunks, self.images.tensors)
        proposed = [self.rows.sequences[row].proposed for _, row, _ in step.samples.per_row()] if self.head is not None else []
        sampled, readings = self._sample(step, plan, watch)
        failed = self.sampler.rules.note(step.samples, sampled.tokens_S, watch)
        if self._on_gpu:
            end = (watch if self.head is None else self.rows.proposing).events[-1]
            self.images.note_use((ref.image_id for chunk in plan.chunks for ref in chunk.visual), end)
        of_step = plan.step, self.tp.rank, launched, sampled, readings, encoded, watch, watch.has_begun()
        return LaunchedStep(*of_step, failed_samples=failed, samples=step.samples, proposed=proposed)

    def _give_up(self, plan: StepPlan, launched: float) -> LaunchedStep:
        """Return a step that computes nothing. Plans in flight may name its images."""
        logger.error("step %d ran out of memory and was abandoned", plan.step)
        if self._on_gpu:
            torch.cuda.synchronize()  # the step's allocations may still be in use
            torch.cuda.empty_cache()
        self.images.leave_out(plan.encodes)
        watch = Stopwatch(self._on_gpu)
        watch.mark()
        return LaunchedStep(plan.step, self.tp.rank, launched, NOTHING_SAMPLED, NOTHING_READ, Encoded(), watch, out_of_memory=True)

    @torch.inference_mode()
    def use_spare_time(self, is_busy: bool) -> bool:
        """Do a small piece of work while there are no plans. Return False if there was none."""
        return self.images.prepare(is_busy)

    def _sample(self, step: HostStep, plan: StepPlan, watch: Stopwatch) -> tuple[Sampled, Readings]:
        """Run forward and sampling; sampled tokens are copied to the host and into the rows. `watch` does not wait for the head's tokens:
        the next plan needs only their number."""
        logits_SV, samples, readings = self._forward(step)
        self.rows.save_snapshots(step, plan.chunks)
        if not len(samples.rows_S):
            watch.mark()
            self._propose(step, samples.rows_S, samples.rows_S, 0)
            return NOTHING_SAMPLED, readings
        samples = self.rows.look_up(samples)
        if self.tp.rank == 0:
            sampled = self.sampler.sample(logits_SV, samples, self.sampler.rules.masks(step.samples, self.rows.proposing))
        else:
            sampled = Sampled(torch.empty_like(samples.rows_S), None)
        self.tp.broadcast_(sampled.tokens_S)  # rank 0's samples count: logits are not bit-equal on every rank
        tokens_S, rows_S = self.rows.deliver(sampled.tokens_S, samples)
        watch.mark()
        self._propose(step, sampled.tokens_S, rows_S, plan.num_proposed)
        return replace(sampled, tokens_S=tokens_S), readings

    def _propose(self, step: HostStep, tokens_S: torch.Tensor, rows_S: torch.Tensor, count: int) -> None:
        if self.head is None:
            return
        self.rows.propose(self.head.run(step, tokens_S, rows_S, count), rows_S, step.samples)

    def _forward(self, step: HostStep) -> tuple[torch.Tensor, Samples, Readings]:
        if self.graphs is not None and self.graphs.fits(step):
            logits_SV, hidden_SD, samples = self.graphs.run(step)
            return logits_SV, samples, step.reports.read_samples(hidden_SD, logits_SV)
        inputs = self.rows.stage(step, self.staging)
        self.attention.plan(inputs.batch.attention)
        hidden_SD = self.model(inputs.batch, self.attention)
        found, readings = step.reports.read(hidden_SD, inputs.indices_S, inputs.scored_2N, self.model.logits)
        if found is None:
            found = hidden_SD.new_zeros((len(inputs.indices_S), self.model.config.text.vocab_size), dtype=torch.float32)
        return found, inputs.samples, readings
