"""The demo's pictures show what their scenes say, and equal seeds give equal pictures."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.demo_training.data import prepare
from models.demo.questions import TASKS, Question, question
from models.demo.render import IMAGE_GEOMETRY, draw
from models.demo.scenes import Scene, random_scene

ROOT = Path(__file__).parents[3]


def test_equal_seeds_give_equal_pictures() -> None:
    for task in TASKS:
        first, second = question(11, task), question(11, task)
        assert first == second
        assert first != question(12, task)


def test_prepared_patches_are_those_of_the_reference_processor() -> None:
    processor = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").Qwen2VLImageProcessorPil(
        size={"shortest_edge": IMAGE_GEOMETRY.min_pixels, "longest_edge": IMAGE_GEOMETRY.max_pixels},
        patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    for seed in range(6):
        scene = random_scene(np.random.default_rng(seed), 0.0) if seed < 3 else Scene(768, 500 + seed, (), 0.0)
        prepared = prepare(np.random.default_rng(seed), scene)
        reference = processor([draw(scene, np.random.default_rng(seed)).image], return_tensors="np")
        pixels = reference["pixel_values"].reshape(-1, 3, 2, 256)
        assert tuple(reference["image_grid_thw"][0]) == (1, *prepared.grid)
        if scene.mess == 0.0:
            assert np.abs(pixels[:, :, 0] - (prepared.patches.reshape(-1, 3, 256) / 127.5 - 1)).max() < 1e-5


def items(item: Question) -> list[list[str]]:
    return [[i.text for i in picture.scene.items] for picture in item.pictures]


def test_answers_follow_from_the_scenes() -> None:
    for seed in range(8):
        count = question(seed, "count")
        assert count.answer == str(len(count.pictures))
        numbers = question(seed, "list")
        texts = [number.text for p in numbers.pictures if (number := p.scene.find("number"))]
        assert numbers.answer.split(", ") == texts and len(texts) == 4
        which = question(seed, "which")
        assert 1 <= int(which.answer.removeprefix("Picture ")) <= len(which.pictures)
        for task in ("number", "word", "shape"):
            asked = question(seed, task)
            assert any(asked.answer in texts for texts in items(asked))
            assert asked.answer.isdigit() == (task == "number")


def test_clients_need_no_torch() -> None:
    """The e2e tests and the benchmarks would start seconds later."""
    code = "import sys, models.demo.questions, models.demo.score; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
