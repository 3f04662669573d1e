"""Before a step's first collective its ranks tell each other whether each has memory for it: behind one, who has none would leave the
others waiting for ever. Answers lie in memory that all map: tens of microseconds, nothing of the device."""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

NAP_S = 20e-6
WORD = 8


class Agreement:
    """Rank `rank` of `size`, which all name the same file; it need not be there yet.

    The n-th answers are the n-th on every rank, since all get the same plans. There is room for two questions: who asks the next but one
    has seen everybody answer the next, which nobody does before having read this one's answers.
    """

    def __init__(self, path: Path, rank: int, size: int, is_stopping: Callable[[], bool]):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, 2 * size * WORD)
            self._answers = memoryview(mmap.mmap(file, 2 * size * WORD)).cast("q")
        finally:
            os.close(file)
        self._is_stopping = is_stopping
        self._rank = rank
        self._size = size
        self._count = 0

    def all_can(self, can: bool) -> bool:
        """Whether every rank says so. Waits for the slowest; False if the worker is told to stop."""
        self._count += 1
        start = self._count % 2 * self._size
        answers = self._answers[start : start + self._size]
        answers[self._rank] = 2 * self._count + can
        while any(answer // 2 != self._count for answer in answers):
            if self._is_stopping():
                return False
            time.sleep(NAP_S)
        return all(answer % 2 for answer in answers)
