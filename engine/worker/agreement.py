"""Agreement of ranks, before a step's first collective, that each has memory for it: otherwise one would leave the others waiting forever.
Answers are in shared memory: tens of microseconds, no device work."""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

NAP_S = 20e-6
WORD = 8


class Agreement:
    """Rank `rank` of `size`. All ranks name the same file, which need not exist yet.

    The n-th answers belong together on every rank, since all receive the same plans. Space for two questions suffices: a rank asks question
    n + 2 only after all ranks have answered n + 1 and thus have read the answers to n.
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
        """Return whether `can` is true on every rank. Waits for the slowest; False if the worker is stopped."""
        self._count += 1
        start = self._count % 2 * self._size
        answers = self._answers[start : start + self._size]
        answers[self._rank] = 2 * self._count + can
        while any(answer // 2 != self._count for answer in answers):
            if self._is_stopping():
                return False
            time.sleep(NAP_S)
        return all(answer % 2 for answer in answers)
