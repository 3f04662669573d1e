"""Steps before the first request, in blocks that no request has yet: kernels are compiled and cuBLAS learns the sizes that the scheduler
cuts. They also check that repeated layers (`models.layers.repeats`) compute what Python launches."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.worker.rows import HostStep, Rows
from engine.worker.runner import Runner
from models.cache.layout import AttentionLayout, offsets_of
from models.kernels.captured import LaunchFailed

logger = logging.getLogger(__name__)

SMALL = (1, 5, 16, 32, 64)  # tokens: ends of prompts, whose kernels have other tiles
TOLERANCE = 0.02  # most of what is added up in another order differs by less


@torch.inference_mode()
def warm_up_steps(runner: Runner, sizes: Sequence[int]) -> None:
    """Run steps of so many tokens that fit the pool. If one fails on the current stream, or its results differ from those on the default
    one, which is never captured, continue on the latter."""
    current, device = torch.cuda.current_stream(), runner.rows.last_tokens.device
    for size in (*SMALL, *sizes):
        if size + 3 * runner.rows.block_size > runner.rows.scratch_slot:
            return
        for has_adapters in (False, True) if runner.adapters is not None else (False,):
            found = []
            for stream in (torch.cuda.default_stream(device), current):
                torch.cuda.synchronize(device)
                torch.cuda.set_stream(stream)
                try:
                    found.append(hidden_of(runner, step_of(runner.rows, size, has_adapters)))
                except LaunchFailed as problem:
                    return stop_repeating(device, str(problem))
            torch.cuda.synchronize(device)
            if not (found[1] - found[0]).norm() <= TOLERANCE * found[0].norm():
                return stop_repeating(device, "the results differ")


def stop_repeating(device: torch.device, problem: str) -> None:
    logger.warning("launches of layers are not repeated: %s", problem)
    torch.cuda.set_stream(torch.cuda.default_stream(device))


def hidden_of(runner: Runner, step: HostStep) -> torch.Tensor:
    """Return the step's final hidden states in float32, from empty states."""
    for group in runner.rows.states:
        group.kept[:, runner.rows.scratch_row].zero_()
    batch = runner.rows.stage(step, runner.staging).batch
    runner.attention.plan(batch.attention)
    hidden_SD = runner.model(batch, runner.attention)
    runner.model.logits(hidden_SD)
    return hidden_SD.float()


def step_of(rows: Rows, size: int, has_adapters: bool) -> HostStep:
    """Return a chunk of a prompt and two decode rows, or a chunk of one token."""
    num_decodes = min(2, size - 1)
    chunk = size - num_decodes
    lengths = np.array([chunk, *[1] * num_decodes])
    pages = -(-lengths // rows.block_size)
    first_slots = rows.block_size * (pages.cumsum() - pages)
    slots = np.concatenate((np.arange(chunk), first_slots[1:]))
    layout = AttentionLayout(
        qo_indptr_cpu=offsets_of(lengths),
        kv_lens_cpu=torch.from_numpy(lengths.astype(np.int32)),
        page_indptr_cpu=offsets_of(pages),
        pages=torch.arange(int(pages.sum()), dtype=torch.int32),
        slot_mapping_T=torch.from_numpy(slots),
        num_prefill_rows=1,
    )
    return replace(
        HostStep.empty(),
        ids=np.arange(chunk),
        gather=np.full(num_decodes, rows.scratch_row),
        rows=np.full(len(lengths), rows.scratch_row),
        positions=np.tile(np.concatenate((np.arange(chunk), [0] * num_decodes)), (3, 1)),
        attention=layout,
        logits_indices=np.arange(chunk - 1, size),
        adapters=np.zeros(size if has_adapters else 0, dtype=np.int32),
    )
