"""Limits of a step's prompt tokens and of its cache reads."""

from itertools import islice

from engine.scheduler.request import Request
from engine.scheduler.state import State

FEW_STEPS = 2  # steps with decodes over which a short prompt is spread
MANY_STEPS = 16  # steps over which many waiting tokens are spread


def prefill_budget(state: State, num_decodes: int, num_lacking: int) -> int:
    """Return the prompt tokens that a step with so many decodes may compute; running requests lack `num_lacking` tokens.

    Chunks alongside decodes are small: streams hardly wait, and a chunk uses weights that the decodes read anyway. The chunk grows with the
    number of waiting prompt tokens: up to `mixed_step_tokens` with the decodes, beyond that only if very many wait. The step has an
    efficient size, and the chunk is at least half of it.
    """
    limits = state.limits
    if num_decodes == 0:
        return limits.max_num_batched_tokens
    sizes = limits.step_sizes
    startable = islice(state.waiting, len(state.free_rows))
    lacking = num_lacking + sum(request.num_tokens for request in startable)
    rows = sizes.padded_decodes(num_decodes)
    usual = min(limits.mixed_step_tokens, sizes.smallest_step(rows + lacking // FEW_STEPS))
    size = max(usual, sizes.largest_step(rows + lacking // MANY_STEPS))
    chunk = max(size - rows, size // 2, 1)
    return min(chunk, limits.max_num_mixed_tokens or sizes.max_prefill(rows), limits.max_num_batched_tokens - num_decodes)


def resting(state: State) -> set[Request]:
    """Return the running requests that a step omits to stay within its limit of cache reads: never the oldest, nor one that reads at most
    an equal share; the rest alternate, at least one per step."""
    limit = state.limits.step_sizes.max_read_tokens
    active = [request for request in state.running if request.wants_tokens] if limit else []
    left = limit - sum([request.num_computed for request in active])
    if left >= 0:
        return set()
    share = limit // len(active)
    others = [request for request in active if request.num_computed > share][1:]
    left += sum([request.num_computed for request in others])
    others.sort(key=lambda request: request.last_step)
    for i, request in enumerate(others):
        left -= request.num_computed
        if left < 0 and i:
            return set(others[i:])
    return set()
