"""Efficient step sizes of a device, to which the scheduler cuts prompts, and those of CUDA graphs."""

from bisect import bisect_left, bisect_right

import msgspec


class StepSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Step sizes, ascending."""

    mixed: tuple[int, ...]  # tokens of steps with prompts and decodes
    cheap: int  # smaller steps of this kind save little
    usual: int  # maximum tokens of such a step unless many more wait
    usual_sparse: int  # the same for bfloat16 experts, nearly all of which a step reads
    max_mixed_prefill: int  # maximum prompt tokens of such a step in any case: --max-num-mixed-tokens
    decodes: tuple[int, ...] = ()  # decode tokens of CUDA graphs; empty: there are none
    verify_rows: int = 0  # query rows, including drafts, that cost little more than one: --draft; 0: no verification
    large_step: int = 64  # increment of decode tokens beyond the listed sizes

    def graph_sizes(self, limit: int) -> list[int]:
        """Return the sizes of graphs below `limit` and the first that reaches it, continued in large increments."""
        if not self.decodes:
            return []
        last = self.decodes[-1]
        every = (*self.decodes, *range(last + self.large_step, limit + self.large_step, self.large_step))
        return list(every[: bisect_left(every, limit) + 1])

    def largest_step(self, num_tokens: int) -> int:
        """Return the largest mixed size of at most so many tokens; 0 if there is none."""
        i = bisect_right(self.mixed, num_tokens)
        return self.mixed[i - 1] if i else 0

    def smallest_step(self, num_tokens: int) -> int:
        """Return the smallest mixed size of at least so many tokens and at least `cheap`; otherwise the largest."""
        i = bisect_left(self.mixed, max(num_tokens, self.cheap))
        return self.mixed[min(i, len(self.mixed) - 1)]
