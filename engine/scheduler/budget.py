"""How many prompt tokens a step computes: the trade between streams that wait and prompts that wait. Called by `policy`."""

from itertools import chain, islice

from engine.scheduler.state import State
from engine.step_sizes import largest_step, padded_decodes

MIXED_STEPS = 16  # steps beside decodes over which waiting prompt tokens are spread


def prefill_budget(state: State, num_decodes: int) -> int:
    """Prompt tokens that a step with so many decodes may compute.

    Beside decodes, chunks are small: streams hardly wait, and their tokens ride on GEMMs that the chunk pays for, so that no step needs to
    decode alone. The more prompt tokens wait, the larger the chunk; it and the decodes together are a size that pays, of which the chunk
    has half at least.
    """
    limits = state.limits
    if num_decodes == 0:
        return limits.max_num_batched_tokens
    rows = padded_decodes(num_decodes)
    size = max(limits.mixed_step_tokens, largest_step(_num_lacking(state) // MIXED_STEPS + rows))
    chunk = max(size - rows, size // 2, 1)
    return min(chunk, limits.max_num_mixed_tokens, limits.max_num_batched_tokens - num_decodes)


def _num_lacking(state: State) -> int:
    """Prompt tokens of the requests that have a row or could have one."""
    waiting = islice(state.waiting, len(state.free_rows))
    prefilling = (request for request in state.running if not request.is_decoding)
    return sum(request.num_tokens - request.num_computed for request in chain(prefilling, waiting))
