"""The demo's pictures show what their scenes say, and equal seeds give equal pictures."""

import subprocess
import sys
from pathlib import Path

from models.demo.questions import TASKS, Question, question

ROOT = Path(__file__).parents[3]


def test_equal_seeds_give_equal_pictures() -> None:
    for task in TASKS:
        first, second = question(11, task), question(11, task)
        assert first == second
        assert first != question(12, task)


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
