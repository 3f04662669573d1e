"""Efficient step sizes of a device: the scheduler cuts prompts to them, and workers capture graphs of the smaller ones."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import msgspec

LONG_STEP = 16  # tokens: sizes of long prompts are multiples
LONGEST = 3072  # tokens: longer chunks are rare
LONG_PADDING = 32  # maximum padding of a long prompt, as a fraction


class StepSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Step sizes, ascending. Without graphs, only `mixed` and the four numbers after it are used: nothing is padded."""

    mixed: tuple[int, ...]  # tokens of steps with prompts and decodes
    cheap: int  # smaller steps of this kind save little
    usual: int  # maximum tokens of such a step unless many more wait
    usual_sparse: int  # the same for bfloat16 experts, nearly all of which a step reads
    max_mixed_prefill: int  # maximum prompt tokens of such a step in any case, see `max_prefill`: --max-num-mixed-tokens
    decodes: tuple[int, ...] = ()  # decode rows of graphs without prompts
    mixed_decodes: tuple[int, ...] = ()  # decode rows of graphs with prompts, from 0
    small_chunks: tuple[int, ...] = ()  # prompt tokens at the end of a cached prompt, with any number of decodes
    largest_chunk: int = 0  # prompt tokens of a graph with many decodes
    launch_work: int = 0  # tokens times parameters of a layer: with more, the device is slower than the host
    few_decodes: int = 0  # decode rows of graphs with prompts that may be longer than `largest_chunk`
    largest_prompt: int = 0  # prompt tokens of these, see `for_layers`
    needs_graphs: bool = False  # without one, `max_mixed_prefill` tokens take the host twice as long as the device, see `for_layers`
    verify_rows: int = 0  # query rows, including drafts, that cost little more than one: --draft; 0: no verification
    large_step: int = 64  # increment of decode rows beyond the listed sizes

    def chunks(self, num_decode_rows: int) -> list[int]:
        """Return the prompt tokens of graphs with so many decode rows, ascending. Sums are efficient sizes, except with `small_chunks` and
        `largest_chunk`."""
        if not self.largest_chunk:
            return []
        limit = self.largest_prompt if num_decode_rows <= self.few_decodes else 0
        fitting = [size - num_decode_rows for size in self.mixed]
        between = [size for size in fitting if self.small_chunks[-1] < size < self.largest_chunk]
        longer = [size for size in fitting if self.largest_chunk < size <= limit] if num_decode_rows else self._long_prompts()
        return [*self.small_chunks, *between, self.largest_chunk, *longer]

    def _long_prompts(self) -> Iterator[int]:
        """Return sizes up to the first that reaches `largest_prompt`, with little padding."""
        size = self.largest_chunk
        while size < self.largest_prompt:
            size += max(LONG_STEP, size // LONG_PADDING // LONG_STEP * LONG_STEP)
            yield size

    def for_layers(
        self,
        num_parameters: int,
        max_tokens: int,
        is_sparse: bool = False,
        is_float8: bool = False,
        has_states: bool = False,
    ) -> "StepSizes":
        """Adapt the sizes to a model with so many parameters per layer, token and rank, and steps of up to `max_tokens`.
        `is_sparse`: a mixture of experts. Recurrent states need twice as many launches per layer, and float8 halves the device time. If
        steps need graphs, twice as many decode rows have graphs of long prompts."""
        num_launched = (self.launch_work << is_float8 << has_states) // num_parameters  # tokens that take the device as long as the host
        needs_graphs = self.largest_chunk > 0 and num_launched >= 2 * self.max_mixed_prefill
        return msgspec.structs.replace(
            self,
            largest_prompt=min(num_launched, max_tokens, LONGEST),
            needs_graphs=needs_graphs,
            few_decodes=self.few_decodes << needs_graphs,
            usual=self.usual_sparse if is_sparse and not is_float8 else self.usual,
        )

    def chunks_by_rows(self, max_num_seqs: int) -> dict[int, list[int]]:
        """Map the numbers of decode rows of graphs with prompts, ascending, to `chunks`."""
        return {rows: self.chunks(rows) for rows in self.up_to(self.mixed_decodes, max_num_seqs)} if self.largest_chunk else {}

    def up_to(self, sizes: tuple[int, ...], limit: int) -> list[int]:
        """Return the sizes below `limit` and the first that reaches it, continued in large increments."""
        more = range(sizes[-1] + self.large_step, limit + self.large_step, self.large_step)
        every = (*sizes, *more)
        return list(every[: bisect_left(every, limit) + 1])

    def max_prefill(self, num_decode_rows: int) -> int:
        """Return the maximum prompt tokens of a step with so many decode rows: those of a graph if steps need graphs."""
        return min(self.chunks(num_decode_rows)[-1], self.max_mixed_prefill) if self.needs_graphs else self.max_mixed_prefill

    def padded_decodes(self, num_decodes: int) -> int:
        return self.up_to(self.mixed_decodes, num_decodes)[-1] if self.mixed_decodes else num_decodes

    def largest_step(self, num_tokens: int) -> int:
        """Return the largest mixed size of at most so many tokens; 0 if there is none."""
        i = bisect_right(self.mixed, num_tokens)
        return self.mixed[i - 1] if i else 0

    def smallest_step(self, num_tokens: int) -> int:
        """Return the smallest mixed size of at least so many tokens and at least `cheap`; otherwise the largest."""
        i = bisect_left(self.mixed, max(num_tokens, self.cheap))
        return self.mixed[min(i, len(self.mixed) - 1)]
