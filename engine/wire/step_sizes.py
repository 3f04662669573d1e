"""Efficient step sizes of a device, to which the scheduler cuts prompts, and those of CUDA graphs; measured at the widths of 8B."""

from bisect import bisect_left, bisect_right

import msgspec


class StepSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Step sizes, ascending."""

    mixed: tuple[int, ...]  # tokens of steps with prompts and decodes
    cheap: int  # smaller steps of this kind save little
    usual: int  # maximum tokens of such a step unless many more wait
    usual_sparse: int  # the same for mixtures, nearly all of whose experts a step reads
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


CPU = StepSizes(mixed=(32, 64), cheap=32, usual=64, usual_sparse=64, max_mixed_prefill=64, verify_rows=32)  # of few cores

# Sizes that fit the tiles of matrix products on any GPU.
PORTABLE = StepSizes(
    mixed=(128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
    cheap=192,
    usual=320,
    usual_sparse=512,
    max_mixed_prefill=1008,
    decodes=(1, 2, 4, *range(8, 129, 8)),
    verify_rows=96,  # estimated: an H200 multiplies 184 times per weight read, an A100 160, an L40S 210; small tiles lose some
)

# On an H200. At some numbers of rows a product loses up to 10 % to partial tiles or cuBLAS's choice; these sizes lose little.
HOPPER = StepSizes(
    mixed=(104, 128, 160, 208, 216, 256, 312, 344, 384, 440, 480, 528, 624, 696, 888, 1024),
    cheap=208,
    usual=312,
    usual_sparse=528,
    max_mixed_prefill=1008,
    decodes=PORTABLE.decodes,
    verify_rows=160,  # computed: an H200 reads a weight in the time of 184 multiplications, in float8 of 160
)

HOPPER_MULTIPROCESSORS = 132  # H100, H200, GH200; an H20 has 78: sizes that fill the others do not fill it


def step_sizes(backend: str, num_multiprocessors: int) -> StepSizes:
    """Return the sizes of a backend on a device with so many multiprocessors (0: a CPU)."""
    if backend == "torch":
        return CPU
    return HOPPER if backend == "hopper" and num_multiprocessors == HOPPER_MULTIPROCESSORS else PORTABLE
