"""Work that must not grow with what has accumulated: log-probabilities of a long prompt, and images that fail together."""

from typing import Any

import msgspec
import numpy as np

from engine.params import PromptLogprobs
from engine.scheduler.core import OUT_OF_MEMORY
from tests.unit.scheduler.simulation import make_core, make_request

NUM_TOP = 2


def part_of(values: np.ndarray, start: int, end: int) -> PromptLogprobs:
    tops = np.repeat(values[start:end], NUM_TOP)
    return PromptLogprobs(start, NUM_TOP, values[start:end].tobytes(), tops.astype(np.int32).tobytes(), tops.tobytes())


def test_log_probabilities_of_a_prompt_are_copied_once() -> None:
    """Red if each chunk copies all that came before: a prompt of 250,000 tokens has 40 MB of them, and thousands of chunks."""
    values = np.arange(1000, dtype=np.float32)
    core = make_core()
    core.add(make_request(1, [7] * 8, [], 4), np.full(8, 7, np.int32))
    request = core._requests[1][0]
    num_bytes = 0
    for start, end in [(1, 400), (1, 300), (200, 600), *((at, at + 1) for at in range(600, 1000))]:  # preempted after 400
        request.note_prompt_logprobs(part_of(values, start, end))
        num_bytes += len(request.prompt_parts[-1].logprobs)
    assert num_bytes <= 4 * (999 + 399)  # the part that came again was dropped
    joined = PromptLogprobs.joined(request.prompt_parts)
    assert joined is not None and (joined.start, joined.end) == (1, 1000)
    assert np.array_equal(np.frombuffer(joined.logprobs, np.float32), values[1:])
    assert np.array_equal(np.frombuffer(joined.top_ids, np.int32).reshape(-1, NUM_TOP)[:, 1], values[1:].astype(np.int32))


class CountedImages(list[Any]):
    num_reads = 0

    def __iter__(self) -> Any:
        CountedImages.num_reads += 1
        return super().__iter__()


def test_images_that_fail_together_cost_one_search() -> None:
    """Red if each of a request's damaged images is looked for in every other request: the scheduler would stop for all of them."""
    core = make_core()
    for rid in range(20):
        request = msgspec.structs.replace(make_request(rid, [7] * 8, [], 4), images=CountedImages())
        core.add(request, np.full(8, 7, np.int32))
    CountedImages.num_reads = 0
    core._fail_images({bytes([number]) * 16 for number in range(100)}, OUT_OF_MEMORY)
    assert 0 < CountedImages.num_reads <= 20
