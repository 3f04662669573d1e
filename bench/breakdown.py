"""Breakdown of the time to first token into consecutive parts, with the client's own part separate.

    started ──client──▶ sent ──transfer──▶ received ──prepare, queue, launch, prefill, sample, reply──▶ first text     rest: not in any part

`received` is on the server's clock. The transfer is the longer of two times: until the kernel has taken the last byte (client's clock),
and the server's reading time.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from bench.client import Answer

STAGES = ("prepare_ms", "queue_ms", "launch_ms", "prefill_ms", "sample_ms", "reply_ms")


def breakdown(answer: Answer) -> dict[str, float]:
    """Return the parts of a request's TTFT in ms. If the server reports no stages, everything after the transfer is `rest_ms`."""
    sending = 1e3 * (answer.written - answer.sent) if answer.written else 0.0
    parts = {"client_ms": 1e3 * (answer.sent - answer.started), "transfer_ms": max(sending, answer.timings.get("receive_ms", 0.0))}
    parts |= {name: answer.timings[name] for name in STAGES if name in answer.timings}
    return {name: round(value, 2) for name, value in parts.items()} | {"rest_ms": round(1e3 * answer.ttft - sum(parts.values()), 2)}


def ttft_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return medians of successful answers, and the parts of the median one."""
    middle = sorted(answers, key=lambda answer: answer.ttft)[len(answers) // 2]
    return {
        "ttft_ms": round(1e3 * statistics.median(answer.ttft for answer in answers), 2),
        "ttft_sent_ms": round(1e3 * statistics.median(answer.ttft_sent for answer in answers), 2),
        "parts_ms": breakdown(middle),
        "stages_ms": middle.timings,
    }


def part_columns(points: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the names of all parts and each point's cells in a table, empty for missing parts."""
    found = [point.get("parts_ms", {}) for point in points]
    names = list(dict.fromkeys(name for parts in found for name in parts))
    cells = [[f"{parts[name]:.1f}" if name in parts else "" for name in names] for parts in found]
    return [name.removesuffix("_ms") for name in names], cells
