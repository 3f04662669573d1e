"""Ranks that answer each other before a step. Red if one acts on the answer to another question, or goes on alone."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.ipc import StopFlag
from engine.worker.agreement import Agreement

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


def test_nobody_goes_on_alone(tmp_path: Path) -> None:
    first, second = (Agreement(tmp_path / "agreement", rank, 2, lambda: False) for rank in range(2))
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            asked = pool.submit(first.all_can, True)
            with pytest.raises(TimeoutError):
                asked.result(timeout=0.05)
            assert second.all_can(True) and asked.result(timeout=5)


def test_who_is_told_to_stop_waits_for_nobody(tmp_path: Path) -> None:
    """Red if a worker has to be killed because another one was quicker to go."""
    stopping = StopFlag()
    agreement = Agreement(tmp_path / "agreement", 0, 2, stopping.is_set)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(agreement.all_can, True)
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.05)
        stopping.set()
        assert asked.result(timeout=5) is False
