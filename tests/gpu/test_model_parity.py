"""The 8B shape on one GPU, bfloat16: our kernels and CUDA graphs against transformers with the same random weights.

Tokens are not compared: a random model in bfloat16 flips them under any change of summation order.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from engine.wire.step_sizes import HOPPER
from engine.worker import graphs
from engine.worker.rows import HostStep, Rows
from models.decoders.batch import ForwardBatch
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.backend import Backend
from models.parallel.group import TensorParallel
from tests.gpu.generated import config_of, fill_generated, reference_logits
from tests.unit.models.harness import PagedRunner, Part, Prompt, noise_image, relative, smooth_image

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

SHAPE = "8B"
TOLERANCE = 2e-2
FLOAT8_TOLERANCE = 8e-2
PROMPTS: dict[str, list[Part]] = {
    "text": [list(range(1000, 151_000, 371))],
    "one image": [[151_644, 872], smooth_image(480, 640), list(range(5000, 90_000, 1703))],
    "three images": [
        [151_644],
        noise_image(320, 320),
        [11, 12],
        smooth_image(736, 1280),
        noise_image(320, 320, seed=1),
        list(range(13, 400, 21)),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(SHAPE)


@pytest.fixture(scope="module")
def model(backend: Backend, folder: Path) -> Iterator[Qwen3VL]:
    ours = Qwen3VL(config_of(SHAPE, folder), TensorParallel.single(), backend, torch.bfloat16)
    fill_generated(ours)
    with torch.inference_mode():
        yield ours


@pytest.fixture(scope="module")
def expected(model: Qwen3VL, folder: Path) -> dict[str, torch.Tensor]:
    return reference_logits(Qwen3VLForConditionalGeneration._from_config, model, folder, PROMPTS)


def runner_of(model: Qwen3VL, backend: Backend) -> PagedRunner:
    return PagedRunner(model, num_blocks=1024, page_size=16, backend=backend)


def whole(model: Qwen3VL, backend: Backend, prompt: Prompt) -> torch.Tensor:
    runner = runner_of(model, backend)
    return runner.step([(runner.start(prompt), len(prompt.ids))], num_prefill_rows=1, want="all")


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_equal_transformers(model: Qwen3VL, backend: Backend, expected: dict[str, torch.Tensor], name: str) -> None:
    assert relative(whole(model, backend, Prompt.build(model.config, PROMPTS[name])), expected[name]) < TOLERANCE


def test_float8_is_close_and_the_same_in_chunks_and_single_tokens(backend: Backend, tmp_path: Path) -> None:
    config = config_of(SHAPE, tmp_path)
    config = replace(config, text=replace(config.text, num_layers=8, quantized_to="float8"))
    few = Qwen3VL(config, TensorParallel.single(), backend, torch.bfloat16)
    fill_generated(few)
    prompt = Prompt.build(config, PROMPTS["one image"])
    with torch.inference_mode():
        expected = whole(few, backend, prompt)
        few.finish()
        rounded = whole(few, backend, prompt)
        assert 5e-3 < relative(rounded, expected) < FLOAT8_TOLERANCE
        runner = runner_of(few, backend)
        session = runner.start(prompt)
        counts = [200, len(prompt.ids) - 209, 2, 3, 1, 1, 1, 1]
        parts = [runner.step([(session, count)], num_prefill_rows=1, want="all") for count in counts]
    assert relative(torch.cat(parts), rounded) < FLOAT8_TOLERANCE


def host_step(batch: ForwardBatch) -> HostStep:
    """Decode rows as a worker's would give them: the ids come with the step, as those of new rows and of drafts."""
    assert batch.rows is not None
    layout = replace(batch.attention, pages=batch.attention.pages.cpu(), slot_mapping_T=batch.attention.slot_mapping_T.cpu())
    ids = batch.input_ids_T.cpu().numpy()
    places = np.arange(len(ids))
    return replace(
        HostStep.empty(),
        gather=places,
        rows=batch.rows.rows_R.cpu().numpy(),
        positions=batch.positions_3T.cpu().numpy(),
        attention=layout,
        logits_indices=batch.logits_indices.cpu().numpy(),
        known=np.stack((places, ids)),
    )


def graphs_of(model: Qwen3VL, backend: Backend, runner: PagedRunner, decodes: tuple[int, ...], num_seqs: int) -> graphs.StepGraphs:
    """Graphs for the runner's pools, one page of which is scratch memory."""
    sizes = msgspec.structs.replace(HOPPER, decodes=decodes)
    make_attention = backend.fixed_attention(runner.pools, model.config.text.num_heads, decodes[-1], 1024)
    assert make_attention is not None
    scratch = runner.start(Prompt([5], [], []))
    runner.step([(scratch, 1)], num_prefill_rows=1)
    options = {"states": runner.states, "scratch_block": scratch.pages[0], "transfers": backend.transfers}
    rows = Rows(num_seqs, 1024, 16, model.config.geometry, model.device, **options)
    found = graphs.StepGraphs(model, make_attention, rows, sizes, decodes[-1])
    found.capture()
    return found


def graph_logits(model: Qwen3VL, backend: Backend, decodes: tuple[int, ...] = (4,)) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt "text" and their positions: in chunks, then token by token through graphs, beside padded rows or alone,
    teacher-forced."""
    prompt, runner = Prompt.build(model.config, PROMPTS["text"]), runner_of(model, backend)
    step_graphs = graphs_of(model, backend, runner, decodes, 15)
    session, found, ends = runner.start(prompt), [], []
    for count in [50, 130, *[1] * 40]:
        if count > 1:
            logits = runner.step([(session, count)], num_prefill_rows=1)
        else:
            logits, *_ = step_graphs.run(host_step(runner.batch([(session, 1)], 0, "last")))
            session.computed += 1
        found.append(logits[-1].clone())
        ends.append(session.computed - 1)
    return torch.stack(found), ends


def test_captured_steps_replay_with_new_lengths(model: Qwen3VL, backend: Backend) -> None:
    """Two texts decode token by token, then verify drafts, every step through the worker's graphs."""
    text, runner = Prompt.build(model.config, PROMPTS["text"]), runner_of(model, backend)
    step_graphs, expected = graphs_of(model, backend, runner, (1, 2, 8), 2), whole(model, backend, text)
    sessions = [runner.start(Prompt(text.ids[:length], [], [])) for length in (100, 70)]
    for session in sessions:
        runner.step([(session, len(session.ids))], num_prefill_rows=1)
        session.ids = text.ids
    for counts in (*[(1, 0)] * 5, *[(1, 1)] * 30, (5, 3), (1, 6), (7, 1), (2, 2)):  # of a row's tokens all but the first are drafts
        members = [(session, count) for session, count in zip(sessions, counts, strict=True) if count]
        logits, hidden, _ = step_graphs.run(host_step(runner.batch(members, 0, "all")))
        assert relative(model.logits(hidden), logits) < TOLERANCE
        wanted = [expected[session.computed : session.computed + count] for session, count in members]
        assert relative(logits, torch.cat(wanted)) < TOLERANCE
        for session, count in members:
            session.computed += count


@pytest.mark.parametrize("num_tokens", [14, 60, 300, 700])
def test_repeated_layers_compute_the_same(model: Qwen3VL, backend: Backend, num_tokens: int) -> None:
    check_repeated_layers(model, backend, num_tokens)


def check_repeated_layers(model: Qwen3VL, backend: Backend, num_tokens: int) -> None:
    """A chunk beside decode rows: layers in Python on the default stream, repeated ones on another. Pools and results are equal in every
    bit, since all launch the same kernels."""
    runner, text = runner_of(model, backend), Prompt.build(model.config, PROMPTS["text"]).ids * 2
    sessions = [runner.start(Prompt(text[:length], [], [])) for length in (num_tokens, 33, 40)]
    for session in sessions[1:]:
        runner.step([(session, len(session.ids) - 1)], num_prefill_rows=1)
    batch = runner.batch([(sessions[0], num_tokens), *((session, 1) for session in sessions[1:])], 1, "last")
    runner.attention.plan(batch.attention)
    found, stream = [], torch.cuda.Stream()
    for context in (nullcontext(), torch.cuda.stream(stream), torch.cuda.stream(stream)):
        torch.cuda.synchronize()
        for states, kept in zip(runner.states, found[0][2] if found else [], strict=False):
            states.values.copy_(kept)
        before = [states.values.clone() for states in runner.states]
        with context:
            result = model(batch, runner.attention)
        torch.cuda.synchronize()
        found.append((result.clone(), [pool.clone() for pair in runner.pools for pool in pair], before))
    assert any(len(kind.layers) > 1 for kinds in model.language_model._repeats._kinds.values() for kind in kinds)
    for result, pools, _ in found[1:]:
        assert result.equal(found[0][0]) and all(ours.equal(theirs) for ours, theirs in zip(pools, found[0][1], strict=True))
