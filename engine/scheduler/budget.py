"""How many prompt tokens a step computes: the trade between streams that wait and prompts that wait. Called by `policy`."""

from itertools import chain, islice

from engine.scheduler.state import State

MIXED_STEPS = 16  # steps beside decodes over which waiting prompt tokens are spread
MIXED_QUANTUM = 256  # larger chunks are multiples of this, as GEMM tiles like them


def prefill_budget(state: State, num_decodes: int) -> int:
    """Prompt tokens that a step with so many decodes may compute.

    Beside decodes, chunks are small: streams hardly wait, and their tokens ride on GEMMs that the chunk pays for, so that no step needs to
    decode alone. The more prompt tokens wait, the larger the chunk.
    """
    limits = state.limits
    if num_decodes == 0:
        return limits.max_num_batched_tokens
    chunk = max(limits.mixed_chunk_tokens, _num_lacking(state) // MIXED_STEPS // MIXED_QUANTUM * MIXED_QUANTUM)
    return min(chunk, limits.max_num_mixed_tokens, limits.max_num_batched_tokens - num_decodes)


def _num_lacking(state: State) -> int:
    """Prompt tokens of the requests that have a row or could have one."""
    waiting = islice(state.waiting, len(state.free_rows))
    prefilling = (request for request in state.running if not request.is_decoding)
    return sum(request.num_tokens - request.num_computed for request in chain(prefilling, waiting))
