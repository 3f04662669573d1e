"""Chunking, batching, caching and preemption do not change tokens: real scheduler core, real runner, tiny model."""

import dataclasses
import io
import random
import runpy

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from engine.scheduler.core import UNREADABLE
from engine.worker.jpeg import apply_orientation
from engine.worker.rows import Rows
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.reference import jpeg
from models.kernels.reference.jpeg import PillowDecoder
from tests.unit.worker.in_process import CPU, Engine, Picture, make_picture

NIGHTLY = pytest.mark.nightly

Prompt = list[list[int] | Picture]


def prompts() -> list[Prompt]:
    rng = random.Random(0)

    def text(length: int) -> list[int]:
        return [rng.randrange(300) for _ in range(length)]

    sizes = [(64, 64), (96, 160), (160, 96), (256, 256), (70, 130)]
    pictures = [make_picture(i, *size) for i, size in enumerate(sizes)]
    shared = [text(21), pictures[3], text(5)]
    many = [text(3)]
    for picture in pictures:
        many += [picture, text(2)]
    return [[text(50)], [text(4), pictures[1], text(9)], many, [*shared, text(7)], [*shared, pictures[0], text(3)]]


@pytest.fixture(scope="module")
def alone(model: Qwen3VL) -> list[list[int]]:
    results = []
    for prompt in prompts():
        engine = Engine(model, prefix_cache=False)
        engine.add(0, prompt)
        results.append(engine.run()[0])
    assert len({tuple(tokens) for tokens in results}) == len(results), "prompts that cannot be told apart test nothing"
    return results


@pytest.mark.parametrize("chunk", [7, *(pytest.param(size, marks=NIGHTLY) for size in (1, 64, 256))])
def test_chunked_equals_whole(model: Qwen3VL, alone: list[list[int]], chunk: int) -> None:
    for prompt, expected in zip(prompts(), alone, strict=True):
        engine = Engine(model, max_num_batched_tokens=chunk, max_num_mixed_tokens=chunk, max_num_seqs=1)
        engine.add(0, prompt)
        assert engine.run()[0] == expected


@pytest.mark.parametrize("chunk", [64, pytest.param(8192, marks=NIGHTLY)])
def test_cached_equals_fresh(model: Qwen3VL, alone: list[list[int]], chunk: int) -> None:
    engine = Engine(model, max_num_batched_tokens=chunk, max_num_mixed_tokens=chunk)
    for rid, prompt in enumerate([*prompts(), *prompts()]):
        engine.add(rid, prompt)
        engine.run()
    assert list(engine.tokens.values()) == [*alone, *alone]
    assert engine.core.state.counters.images_encoded == 5


@pytest.mark.parametrize(
    ("chunk", "prefix_cache"), [(16, False), (8192, True), *(pytest.param(*case, marks=NIGHTLY) for case in ((16, True), (8192, False)))]
)
def test_answers_to_one_request_equal_one_alone(model: Qwen3VL, alone: list[list[int]], chunk: int, prefix_cache: bool) -> None:
    engine = Engine(model, max_num_batched_tokens=chunk, max_num_mixed_tokens=max(1, chunk // 2), prefix_cache=prefix_cache)
    for rid, prompt in enumerate(prompts()):
        engine.add(rid, prompt, n=3)
        engine.step()
    assert list(engine.run().values()) == [tokens for tokens in alone for _ in range(3)]
    assert engine.core.state.counters.images_encoded == 5


def test_eviction_and_preemption_change_nothing(model: Qwen3VL, alone: list[list[int]]) -> None:
    engine = Engine(model, num_blocks=30, image_tokens=100, max_num_batched_tokens=96, max_num_mixed_tokens=48)
    for rid, prompt in enumerate([*prompts(), *prompts()]):
        engine.add(rid, prompt)
    assert list(engine.run().values()) == [*alone, *alone]
    assert engine.core.state.images.num_evicted > 0 and engine.core.state.counters.preemptions > 0


def test_sampling_depends_on_seed_and_position_only(model: Qwen3VL) -> None:
    sampled = []
    for chunk, crowd in ((8192, 0), (8, 3)):
        engine = Engine(model, max_num_batched_tokens=chunk, max_num_mixed_tokens=chunk)
        for rid in range(crowd):
            engine.add(100 + rid, [[7 + rid] * 20], temperature=1.0, seed=rid)
        engine.add(0, prompts()[0], temperature=1.0, seed=11, top_k=50, top_p=0.9)
        engine.add(1, prompts()[0], temperature=1.0, seed=12, top_k=50, top_p=0.9)
        tokens = engine.run()
        sampled.append((tokens[0], tokens[1]))
    assert sampled[0] == sampled[1]
    assert sampled[0][0] != sampled[0][1]


def test_an_image_that_cannot_be_decoded_fails_its_requests_only(model: Qwen3VL, alone: list[list[int]]) -> None:
    broken = dataclasses.replace(make_picture(7, 64, 64), jpeg=b"\xff\xd8 no picture \xff\xd9")
    engine = Engine(model)
    engine.add(0, prompts()[1])
    engine.add(1, [[1, 2], broken, [3]])
    engine.add(2, [[4], broken, [5]])
    assert engine.run() == {0: alone[1], 1: [], 2: []}
    assert engine.errors == dict.fromkeys((1, 2), UNREADABLE.message)
    engine.add(3, [[1, 2], dataclasses.replace(broken, jpeg=None), [3]])
    assert len(engine.run()[3]) == 8


@pytest.mark.parametrize("where", ["encode", "logits"])
def test_a_step_without_memory_fails_its_requests_only(
    model: Qwen3VL, alone: list[list[int]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model)
    engine.add(0, prompts()[0])
    engine.step()

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model.tower if where == "encode" else model, where, run_out)
        engine.add(1, prompts()[1])
        assert engine.step() and engine.errors.keys() == {0, 1}
        several = Engine(model)
        patch.setattr(several._runner, "tp", dataclasses.replace(model.tp, size=2))
        several.add(0, prompts()[1])
        with pytest.raises(torch.OutOfMemoryError):  # the other ranks wait in a collective: the engine ends
            several.step()
    for rid in (2, 3):
        engine.add(rid, prompts()[rid - 2])
    tokens = engine.run()
    assert [tokens[2], tokens[3]] == alone[:2]
    assert engine.core.state.counters.images_encoded == 2


def test_jpegs_are_decoded_as_pillow_does_and_turned_upright() -> None:
    image = Image.fromarray(make_picture(1, 40, 64).pixels)
    for orientation in range(1, 9):
        buffer = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.save(buffer, "JPEG", quality=92, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(buffer)).convert("RGB")
        decoded = PillowDecoder(1, CPU).decode([memoryview(buffer.getvalue())])[0]
        assert decoded is not None
        assert np.array_equal(apply_orientation(decoded, orientation).numpy(), np.asarray(expected))


def test_the_worker_has_no_limit_of_its_own_on_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    runpy.run_path(jpeg.__file__)
    assert Image.MAX_IMAGE_PIXELS is None


def test_a_layout_has_the_pages_and_slots_of_its_rows(model: Qwen3VL) -> None:
    rows = Rows(8, 1024, 16, model.config.geometry, CPU)
    tables = np.random.default_rng(0).integers(0, 9999, (8, 1024)).astype(np.int32)
    rows._tables[:] = tables
    which, starts, lengths = np.asarray([5, 0, 7, 2]), np.asarray([0, 16 * 900 - 1, 17, 40]), np.asarray([20, 1, 1, 3])
    layout = rows.layout(which, starts, lengths, 1)
    pages, slots = [], []
    for row, start, length in zip(which, starts, lengths, strict=True):
        pages += tables[row, : -(-(start + length) // 16)].tolist()
        slots += [int(tables[row, place // 16]) * 16 + place % 16 for place in range(start, start + length)]
    assert layout.pages.tolist() == pages and layout.slot_mapping_T.tolist() == slots
    assert layout.page_indptr_cpu.tolist()[-1] == len(pages) and layout.kv_lens_cpu.tolist() == (starts + lengths).tolist()
