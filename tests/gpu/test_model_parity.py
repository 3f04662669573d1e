"""The 8B shape on one GPU, bfloat16: our kernels and CUDA graphs against transformers with the same random weights.

Tokens are not compared: a random model in bfloat16 flips them under any change of summation order.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from engine.worker import graphs
from engine.worker.rows import HostStep, Rows
from engine.worker.sampling.samples import HostSamples
from models.decoders.batch import ForwardBatch
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.backend import Backend
from models.kernels.hopper.tuned import STEP_SIZES as HOPPER_STEP_SIZES
from models.parallel.group import TensorParallel
from tests.gpu.generated import config_of, fill_generated, reference_logits
from tests.unit.models.harness import PagedRunner, Part, Prompt, Session, Want, noise_image, relative, smooth_image

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
    """The batch as a worker's rows would give it: the ids of decode rows' tokens come with the step, as those of new rows and of drafts."""
    layout = replace(batch.attention, pages=batch.attention.pages.cpu(), slot_mapping_T=batch.attention.slot_mapping_T.cpu())
    ids, num_prefill = batch.input_ids_T.cpu().numpy(), int(layout.qo_indptr_cpu[layout.num_prefill_rows])
    places, decode_rows = np.arange(len(ids) - num_prefill), np.arange(len(layout.kv_lens_cpu) - layout.num_prefill_rows)
    return HostStep(
        ids=ids[:num_prefill],
        gather=places,
        rows=np.concatenate((np.zeros(layout.num_prefill_rows, dtype=np.int64), decode_rows)),
        positions=batch.positions_3T.cpu().numpy(),
        attention=layout,
        visual=batch.visual,
        logits_indices=batch.logits_indices.cpu().numpy(),
        samples=HostSamples.empty(),
        known=np.stack((places, ids[num_prefill:])),
    )


def graph_logits(model: Qwen3VL, backend: Backend, decodes: tuple[int, ...] = (4,)) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt "text" and their positions, through graphs: in chunks that graphs pad, then token by token beside padded
    rows or alone, teacher-forced."""
    sizes = msgspec.structs.replace(
        HOPPER_STEP_SIZES, decodes=decodes, mixed_decodes=(4,), small_chunks=(64,), largest_chunk=256, mixed=(260,), max_mixed_prefill=256
    )
    prompt, runner = Prompt.build(model.config, PROMPTS["text"]), runner_of(model, backend)
    make_attention = backend.fixed_attention(runner.pools, model.config.text.num_heads, graphs.MAX_PREFILL_ROWS + 1, 4, 1024)
    assert make_attention is not None
    scratch = runner.start(Prompt(prompt.ids[:1], [], []))
    runner.step([(scratch, 1)], num_prefill_rows=1)
    options = {"states": runner.states, "scratch_block": scratch.pages[0], "transfers": backend.transfers}
    rows = Rows(15, 1024, 16, model.config.geometry, model.device, **options)
    step_graphs = graphs.StepGraphs(model, make_attention, rows, sizes, 4, 4)
    step_graphs.capture()
    session, found, ends = runner.start(prompt), [], []
    for count in [50, 130, *[1] * 40]:
        logits, *_ = step_graphs.run(host_step(runner.batch([(session, count)], int(count > 1), "last")))
        found.append(logits[-1].clone())
        session.computed += count
        ends.append(session.computed - 1)
    return torch.stack(found), ends


def test_captured_steps_replay_with_new_lengths(model: Qwen3VL, backend: Backend) -> None:
    """A text decodes while a prompt with images is computed in chunks of all sizes, then alone, every step through the worker's graphs."""
    sizes = msgspec.structs.replace(HOPPER_STEP_SIZES, mixed_decodes=(2,), small_chunks=(64,), largest_chunk=256)
    text, images = (Prompt.build(model.config, PROMPTS[name]) for name in ("text", "three images"))
    runner = runner_of(model, backend)
    make_attention = backend.fixed_attention(runner.pools, model.config.text.num_heads, graphs.MAX_PREFILL_ROWS + 1, 8, 1024)
    assert make_attention is not None
    scratch_block = runner.start(Prompt(text.ids[:1], [], []))
    runner.step([(scratch_block, 1)], num_prefill_rows=1)
    options = {"scratch_block": scratch_block.pages[0], "transfers": backend.transfers}
    rows = Rows(2, 1024, 16, model.config.geometry, model.device, **options)
    step_graphs = graphs.StepGraphs(model, make_attention, rows, sizes, 2, 8)
    step_graphs.capture()

    def step(members: list[tuple[Session, int]], num_prefill_rows: int, want: Want = "last") -> torch.Tensor:
        logits, hidden, _ = step_graphs.run(host_step(runner.batch(members, num_prefill_rows, want)))
        assert relative(model.logits(hidden), logits) < TOLERANCE
        logits = logits.clone()
        for session, count in members:
            session.computed += count
        return logits

    decoding, prefilling = runner.start(Prompt(text.ids[:100], [], [])), runner.start(images)
    step([(decoding, 37)], 1)
    step([(decoding, 63)], 1)
    decoded = []
    for count in itertools.cycle([5, 64, 256, 1, 100, 255]):
        rest = len(images.ids) - prefilling.computed
        decoding.ids.append(text.ids[len(decoding.ids)])
        members = [(prefilling, min(count, rest))] if rest else []
        logits = step([*members, (decoding, 1)], len(members))
        decoded.append(logits[-1])
        if rest and rest <= count:
            assert relative(logits[0], whole(model, backend, images)[-1]) < TOLERANCE
        if len(decoded) == 60:
            break
    expected = whole(model, backend, text)
    assert relative(torch.stack(decoded), expected[100:160]) < TOLERANCE and prefilling.computed == len(images.ids)
    drafting = [runner.start(Prompt(text.ids[:length], [], [])) for length in (70, 90)]
    for session in drafting:
        step([(session, len(session.ids))], 1)
        session.ids = text.ids
    for counts in ((5, 3), (1, 6), (7, 1), (2, 2)):  # a row with that many tokens, of which all but the first are drafts
        starts = [session.computed for session in drafting]
        logits = step(list(zip(drafting, counts, strict=True)), 0, "all")
        wanted = [expected[start : start + count] for start, count in zip(starts, counts, strict=True)]
        assert relative(logits, torch.cat(wanted)) < TOLERANCE
