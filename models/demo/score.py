"""Count right answers: exact match, Wilson's interval, a table. Used by `evaluate` and `bench/accuracy.py`; no torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Score:
    """Number of right answers among `count` of one task."""

    task: str
    right: int
    count: int

    @property
    def accuracy(self) -> float:
        """Return the share of right answers."""
        return self.right / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """Return Wilson's 95 % interval of the accuracy."""
        n, p = self.count, self.accuracy
        centre = (p + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
        half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)


def score(results: Iterable[tuple[str, bool]]) -> list[Score]:
    """Return one score per task from (task, is right) pairs, in order of first appearance."""
    counts: dict[str, list[int]] = {}
    for task, right in results:
        entry = counts.setdefault(task, [0, 0])
        entry[0] += right
        entry[1] += 1
    return [Score(task, right, count) for task, (right, count) in counts.items()]


def table(scores: Iterable[Score]) -> str:
    """Return a Markdown table."""
    lines = ["| task | questions | right | accuracy | 95 % interval |", "|---|---|---|---|---|"]
    for s in scores:
        low, high = s.interval
        lines.append(f"| {s.task} | {s.count} | {s.right} | {100 * s.accuracy:.1f} % | {100 * low:.1f} – {100 * high:.1f} % |")
    return "\n".join(lines)
