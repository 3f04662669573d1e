"""Trains the demo model from scratch: `python -m bench.demo_training.train --out FOLDER --minutes 12 [--stop-after M --state FILE]`.

Time, not steps, drives the schedules. With `--state` the run is saved every two minutes and at `--stop-after`; the same command resumes it.
"""

import argparse
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.demo_training.data import IGNORED, Batch, Sizes
from bench.demo_training.export import export
from bench.demo_training.feed import Feed
from bench.demo_training.files import write_files
from bench.demo_training.net import Losses, Trainee, build_model
from bench.demo_training.optim import Optimiser, level_at, rate_at
from models.demo import CHECKPOINT

log = logging.getLogger("train")

SMALL = Sizes(patches=4096, tokens=3072, answers=768, pictures=128, conversations=64)  # for a look on a CPU
CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process is asked to do; minutes count over all processes of a run."""

    out: Path
    minutes: float
    stop_after: float
    state: Path | None
    workers: int
    seed: int
    matrix_rate: float
    rest_rate: float


class Run:
    """One training run: the trainee, its optimiser, the static input of the step, and the clock."""

    def __init__(self, plan: Plan, device: torch.device, sizes: Sizes) -> None:
        self.plan, self.device = plan, device
        self.trainee = Trainee(build_model(plan.seed), sizes, device)
        self.optimiser = Optimiser(self.trainee, plan.matrix_rate, plan.rest_rate, device)
        self.inputs: dict[str, Tensor] = {}
        self.aux = torch.ones((), device=device)
        self.losses: Losses | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.spent = 0.0  # seconds of earlier processes
        self.steps = 0
        self.eager_steps = 0  # of this process: a graph is captured after a warm-up

    def save(self, spent: float) -> None:
        """Write the state file, if the plan names one."""
        if self.plan.state:
            state = {"weights": self.trainee.state_dict(), "optimiser": self.optimiser.state(), "spent": spent, "steps": self.steps}
            part = self.plan.state.with_suffix(".part")
            torch.save(state, part)
            part.replace(self.plan.state)

    def resume(self) -> None:
        """Continue from the state file, if there is one."""
        if self.plan.state and self.plan.state.exists():
            state = torch.load(self.plan.state, map_location=self.device)
            self.trainee.load_state_dict(state["weights"])
            self.optimiser.load(state["optimiser"])
            self.spent, self.steps = state["spent"], state["steps"]

    def load(self, batch: Batch) -> None:
        """Copy a batch into the static inputs."""
        for name, array in batch.arrays().items():
            value = torch.from_numpy(array)
            if name in self.inputs:
                self.inputs[name].copy_(value)
            else:
                self.inputs[name] = value.to(self.device, copy=True)

    def compute(self) -> None:
        """Forward, backward, update; on the static inputs and without a host synchronisation."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            losses = self.trainee(self.inputs)
        total = losses.answer + self.aux * (losses.label + 0.5 * losses.colour + 0.2 * losses.index)
        for p in self.optimiser.parameters:
            p.grad = None
        total.backward()
        grads = [p.grad for p in self.optimiser.parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (CLIP / (norm + 1e-6)).clamp(max=1.0))
        self.optimiser.step()
        self.losses = Losses(*(x.detach() for x in (losses.answer, losses.label, losses.colour, losses.index, losses.hits)))

    def step(self, progress: float) -> None:
        """One update at this share of the run. On a GPU, the one after three eager ones becomes a CUDA graph that later ones replay."""
        self.optimiser.rate.fill_(rate_at(progress))
        self.optimiser.decay.fill_(min(0.998, self.steps / (self.steps + 100)))
        self.aux.fill_(max(0.05, 1 - 2 * progress))
        if self.graph is not None:
            self.graph.replay()
        elif self.device.type == "cuda" and self.eager_steps >= 3:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.compute()
            self.graph.replay()
        else:
            self.compute()
            self.eager_steps += 1
        self.steps += 1

    def report(self, elapsed: float, waiting: int) -> None:
        """One line of losses; `exact` is the share of answers whose every token came first."""
        assert self.losses is not None
        losses, targets = self.losses, self.inputs["answer_ids"].cpu().numpy()
        hits = losses.hits.cpu().numpy()
        log.info(
            "%5.0f s step %6d answer %.4f label %.4f colour %.4f index %.4f tokens %.4f exact %.4f ready %d",
            elapsed, self.steps, losses.answer.item(), losses.label.item(), losses.colour.item(), losses.index.item(),
            float(hits[targets != IGNORED].mean()), exact(self.inputs["answer_at"].cpu().numpy(), targets, hits), waiting,
        )  # fmt: skip


def exact(answer_at: np.ndarray, targets: np.ndarray, hits: np.ndarray) -> float:
    """Share of answers, runs of neighbouring positions, without a miss."""
    used = targets != IGNORED
    starts = np.flatnonzero(np.diff(answer_at[used], prepend=-2) != 1)
    return float(np.logical_and.reduceat(hits[used], starts).mean())


def train(plan: Plan, device: torch.device, sizes: Sizes) -> bool:
    """Train until the plan's end or its stop; True if the run is complete. The averaged weights are exported either way."""
    write_files(plan.out, Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))
    with Feed(plan.out / "tokenizer.json", sizes, plan.workers, plan.seed) as feed:
        run = Run(plan, device, sizes)
        run.resume()
        started = reported = saved = time.monotonic()
        elapsed = run.spent
        while elapsed < min(plan.minutes, plan.stop_after) * 60:
            progress = elapsed / (plan.minutes * 60)
            feed.set_level(level_at(progress))
            slot, batch = feed.take()
            run.load(batch)
            feed.release(slot)
            run.step(progress)
            now = time.monotonic()
            elapsed = run.spent + now - started
            if now - reported > 10:
                run.report(elapsed, feed.waiting())
                reported = now
            if now - saved > 120:
                run.save(elapsed)
                saved = now
        run.report(elapsed, feed.waiting())
    run.save(elapsed)
    export(run.trainee.model, dict(zip(_names(run), run.optimiser.average, strict=True)), plan.out)
    return elapsed >= plan.minutes * 60


def _names(run: Run) -> list[str]:
    return [name for name, p in run.trainee.named_parameters() if p.requires_grad]


def main() -> None:
    """Read the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--minutes", type=float, default=12.0, help="length of the whole run")
    parser.add_argument("--stop-after", type=float, default=1e9, help="minutes of the whole run after which this process stops")
    parser.add_argument("--state", type=Path, help="file to save to and resume from")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=int(np.datetime64("2026-11-20").astype(int)))
    parser.add_argument("--matrix-rate", type=float, default=0.015)
    parser.add_argument("--rest-rate", type=float, default=2e-3)
    parser.add_argument("--small", action="store_true", help="small batches, for a CPU")
    args = vars(parser.parse_args())
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    sizes = SMALL if args.pop("small") else Sizes()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log.info("complete: %s", train(Plan(**args), device, sizes))


if __name__ == "__main__":
    main()
