"""Sizes of steps that pay: the scheduler cuts the chunks of prompts to them, and the worker has CUDA graphs of the smaller ones.

A matrix product loses up to a tenth at some numbers of rows, where its tiles do not fit them or cuBLAS chooses badly: 416 rows take longer
than 440. The sizes of steps that mix prompts and decodes are those that lose little on an H200, at the widths of the 8B model.
"""

MIXED_STEP_SIZES = (104, 128, 160, 208, 216, 256, 312, 344, 384, 440, 480, 528, 624, 696, 888, 1024)
MIXED_DECODE_SIZES = (8, 16, 24, 32, 48, 64, 96, 128)  # decode rows of a mixed graph
SMALL_CHUNKS = (16, 64)  # prompt tokens, for the end of a cached prompt beside any number of decodes
CHEAP_STEP = 208  # its products take a fifth longer than those of 64 tokens: to cut a chunk smaller saves little
LARGEST_CHUNK = 512  # prompt tokens of a graph; larger steps keep the device busy while the host launches them
LARGE_STEP = 64  # beyond the listed sizes, numbers of decode rows in steps of this


def chunk_sizes(num_decode_rows: int) -> list[int]:
    """Prompt tokens of the graphs with so many decode rows, ascending: both together are a size that pays, but for the ends of the list."""
    fitting = {size - num_decode_rows for size in MIXED_STEP_SIZES}
    return [*SMALL_CHUNKS, *sorted(size for size in fitting if SMALL_CHUNKS[-1] < size < LARGEST_CHUNK), LARGEST_CHUNK]


def sizes_up_to(sizes: tuple[int, ...], limit: int) -> list[int]:
    """The sizes below `limit` and the first one that reaches it, continued in large steps."""
    more = range(sizes[-1] + LARGE_STEP, limit + LARGE_STEP, LARGE_STEP)
    below = [size for size in (*sizes, *more) if size < limit]
    return [*below, next(size for size in (*sizes, *more) if size >= limit)]


def padded_decodes(num_decodes: int) -> int:
    """Decode rows of the mixed graph that takes so many."""
    return sizes_up_to(MIXED_DECODE_SIZES, num_decodes)[-1]


def largest_step(num_tokens: int) -> int:
    """The largest size that pays of at most so many tokens; 0 if there is none."""
    return max((size for size in MIXED_STEP_SIZES if size <= num_tokens), default=0)


def smallest_step(num_tokens: int) -> int:
    """The smallest size that pays of at least so many tokens, but none below CHEAP_STEP; the largest of all if there is none."""
    return next((size for size in MIXED_STEP_SIZES if size >= max(num_tokens, CHEAP_STEP)), MIXED_STEP_SIZES[-1])
