"""How long a stream stands still beside what others do."""

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import httpx

from tests.e2e.serving import Engine, chat_body

MIN_GAPS = 30
STALL_S = 0.2  # 99th percentile of the gaps, above that of an idle engine


def p99_gap(engine: Engine, seconds: float) -> float:
    """Between chunks of a stream that is heard for so long, or until it has some."""
    times: list[float] = []
    body = chat_body("Hello", max_tokens=4000, ignore_eos=True, stream=True)
    with httpx.stream("POST", f"{engine.url}/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if '"content":"' in line:
                times.append(time.monotonic())
                if times[-1] - times[0] > seconds and len(times) > MIN_GAPS + 1:
                    break
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(gaps) > MIN_GAPS
    return statistics.quantiles(gaps, n=100)[-1]


def stall_beside(engine: Engine, beside: Callable[[], AbstractContextManager[None]], seconds: float, limit: float = STALL_S) -> float:
    """The gap within `beside`, above that of an idle engine; again if it reaches the limit, for other tests may run beside this one, and
    the least of four."""
    stalls: list[float] = []
    while len(stalls) < 4 and min(stalls, default=limit) >= limit:
        idle = p99_gap(engine, 2.0)
        with beside():
            busy = p99_gap(engine, seconds)
        stalls.append(busy - idle)
    return min(stalls)
