"""Ranks that answer each other before a step. Red if a rank acts on the answer to another question, or goes on alone."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.launch.child import StopFlag
from engine.worker.agreement import Agreement
from tests.eventually import eventually

NUM_QUESTIONS = 400


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_come_to_the_same_answer(tmp_path: Path, size: int) -> None:
    answers = [[random.Random(f"{rank} {i}").random() < 0.7 for i in range(NUM_QUESTIONS)] for rank in range(size)]

    def run(rank: int) -> list[bool]:
        agreement = Agreement(tmp_path / "agreement", rank, size, lambda: False)
        return [agreement.all_can(can) for can in answers[rank]]

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    expected = [all(answers[rank][i] for rank in range(size)) for i in range(NUM_QUESTIONS)]
    assert found == [expected] * size
    assert True in expected and False in expected


def test_no_rank_goes_on_alone(tmp_path: Path) -> None:
    waits = threading.Event()
    first = Agreement(tmp_path / "agreement", 0, 2, lambda: bool(waits.set()))  # asked whenever the rank waits
    second = Agreement(tmp_path / "agreement", 1, 2, lambda: False)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            waits.clear()
            asked = pool.submit(first.all_can, True)
            eventually(lambda asked=asked: waits.is_set() or asked.done(), "rank 0 waits")
            assert not asked.done()
            assert second.all_can(True) and asked.result(timeout=60)


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    stopping, waits = StopFlag(), threading.Event()
    agreement = Agreement(tmp_path / "agreement", 0, 2, lambda: bool(waits.set()) or stopping.is_set())
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(agreement.all_can, True)
        eventually(lambda: waits.is_set() or asked.done(), "rank 0 waits")
        assert not asked.done()
        stopping.set()
        assert asked.result(timeout=60) is False
