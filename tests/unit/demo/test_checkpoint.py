"""The shipped checkpoint loads in transformers unchanged and reads pictures it never saw."""

import json
import subprocess
import sys

import pytest
import torch

from models.demo import CHECKPOINT
from models.demo.evaluate import Reference, ask_all
from models.demo.questions import question

FOLDER_LIMIT = 12_000_000


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(CHECKPOINT, torch.device("cpu"))


def test_the_whole_demo_stays_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.parent.rglob("*") if path.is_file() and path.suffix != ".pyc") <= FOLDER_LIMIT


def test_recorded_answers_are_those_of_this_checkpoint(reference: Reference) -> None:
    """Otherwise run `evaluate --record`: parity tests compare the engine with this file."""
    records = json.loads((CHECKPOINT.parent / "reference_answers.json").read_text())
    assert len(records) >= 200
    chosen = records[::24]
    items = [question(record["seed"], record["task"]) for record in chosen]
    assert [item.answer for item in items] == [record["answer"] for record in chosen]
    said = ask_all(reference, items, batch=len(items))
    assert sum(a.text == record["said"] for a, record in zip(said, chosen, strict=True)) >= len(chosen) - 1
    assert sum(abs(a.margin - record["margin"]) < 0.05 for a, record in zip(said, chosen, strict=True)) >= len(chosen) - 1


def test_clients_need_no_torch() -> None:
    code = "import sys, models.demo.questions, models.demo.score; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
