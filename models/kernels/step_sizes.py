"""Sizes of steps that pay on a device: the scheduler cuts prompts to them, workers have graphs of the smaller ones."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import msgspec

LONG_STEP = 16  # tokens: sizes of long prompts are multiples
LONGEST = 3072  # tokens: longer chunks are rare
LONG_PADDING = 32  # a long prompt is padded by this part at most


class StepSizes(msgspec.Struct, frozen=True, kw_only=True):
    """All sizes ascend. Without graphs only `mixed` and the three numbers below it count: nothing is padded."""

    mixed: tuple[int, ...]  # tokens of steps that compute prompts beside decodes
    cheap: int  # to cut such a step smaller saves little
    usual: int  # most tokens of such a step unless much more waits: --mixed-step-tokens
    usual_sparse: int  # the same for experts in bfloat16, of which a step reads nearly all
    max_mixed_prefill: int  # most prompt tokens of such a step, whatever waits: --max-num-mixed-tokens
    decodes: tuple[int, ...] = ()  # decode rows of graphs without prompts
    mixed_decodes: tuple[int, ...] = ()  # decode rows of graphs with prompts, from none on
    small_chunks: tuple[int, ...] = ()  # prompt tokens for the end of a cached prompt, beside any number of decodes
    largest_chunk: int = 0  # prompt tokens of a graph beside many decodes
    launch_work: int = 0  # tokens times parameters of a layer: with more, the device is slower than the host
    few_decodes: int = 0  # decode rows of graphs with prompts that may be longer than `largest_chunk`
    largest_prompt: int = 0  # prompt tokens of these, see `for_layers`
    verify_rows: int = 0  # query rows of a step, drafts included, that cost little more than one: --draft; 0: none are verified
    read_bytes: int = 0  # of keys and values that the rows of a step may read; 0: as many as they have
    max_read_tokens: int = 0  # the same in tokens, see `for_layers`
    large_step: int = 64  # beyond the listed sizes, numbers of decode rows in steps of this

    def chunks(self, num_decode_rows: int) -> list[int]:
        """Prompt tokens of the graphs with so many decode rows, ascending: both together are a size that pays, but for `small_chunks` and
        `largest_chunk`."""
        if not self.largest_chunk:
            return []
        limit = self.largest_prompt if num_decode_rows <= self.few_decodes else 0
        fitting = [size - num_decode_rows for size in self.mixed]
        between = [size for size in fitting if self.small_chunks[-1] < size < self.largest_chunk]
        longer = [size for size in fitting if self.largest_chunk < size <= limit] if num_decode_rows else self._long_prompts()
        return [*self.small_chunks, *between, self.largest_chunk, *longer]

    def _long_prompts(self) -> Iterator[int]:
        """Up to one that reaches `largest_prompt`, with little padding."""
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
        token_bytes: int = 1,
    ) -> "StepSizes":
        """For a model whose layers multiply a token by so many parameters of a rank, in steps of up to `max_tokens`, and which caches
        `token_bytes` of a token there. `is_sparse`: they are a mixture of experts. Recurrent states take twice as many launches a layer,
        and float8 halves what the device does meanwhile."""
        work = self.launch_work << is_float8 << has_states
        return msgspec.structs.replace(
            self,
            max_read_tokens=self.read_bytes // token_bytes,
            largest_prompt=min(work // num_parameters, max_tokens, LONGEST),
            usual=self.usual_sparse if is_sparse and not is_float8 else self.usual,
        )

    def chunks_by_rows(self, max_num_seqs: int) -> dict[int, list[int]]:
        """Numbers of decode rows, ascending, of graphs with prompts -> `chunks`."""
        return {rows: self.chunks(rows) for rows in self.up_to(self.mixed_decodes, max_num_seqs)} if self.largest_chunk else {}

    def up_to(self, sizes: tuple[int, ...], limit: int) -> list[int]:
        """The sizes below `limit` and the first one that reaches it, continued in large steps."""
        more = range(sizes[-1] + self.large_step, limit + self.large_step, self.large_step)
        every = (*sizes, *more)
        return list(every[: bisect_left(every, limit) + 1])

    def padded_decodes(self, num_decodes: int) -> int:
        return self.up_to(self.mixed_decodes, num_decodes)[-1] if self.mixed_decodes else num_decodes

    def largest_step(self, num_tokens: int) -> int:
        """The largest mixed size of at most so many tokens; 0 if there is none."""
        i = bisect_right(self.mixed, num_tokens)
        return self.mixed[i - 1] if i else 0

    def smallest_step(self, num_tokens: int) -> int:
        """The smallest mixed size of at least so many tokens, but none below `cheap`; the largest of all if there is none."""
        i = bisect_left(self.mixed, max(num_tokens, self.cheap))
        return self.mixed[min(i, len(self.mixed) - 1)]
