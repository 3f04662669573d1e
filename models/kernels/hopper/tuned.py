"""Measured numbers: on an H200, at the widths of the 8B model, with heads of 128 values. Tile sizes of a kernel are in its source."""

from typing import NamedTuple

from models.kernels.step_sizes import StepSizes
from models.kernels.triton.tuned import STEP_SIZES as ANY_STEP_SIZES
from models.vision.shares import SplitCosts

# At some numbers of rows a product loses up to 10 % to partial tiles or cuBLAS's choice; these sizes lose little.
STEP_SIZES = StepSizes(
    mixed=(104, 128, 160, 208, 216, 256, 312, 344, 384, 440, 480, 528, 624, 696, 888, 1024),
    cheap=208,
    usual=312,
    usual_sparse=528,
    max_mixed_prefill=1008,
    decodes=(1, 2, 4, *range(8, 129, 8)),
    verify_rows=160,  # computed: an H200 reads a weight in the time of 184 multiplications, in float8 of 160
)

BY_MULTIPROCESSORS = {132: STEP_SIZES}  # H100, H200, GH200; an H20 has 78: sizes that fill the others do not fill it


def step_sizes(num_multiprocessors: int) -> StepSizes:
    """Return the sizes of a Hopper GPU with so many multiprocessors, or those for any GPU."""
    return BY_MULTIPROCESSORS.get(num_multiprocessors, ANY_STEP_SIZES)


# A patch takes 1.84 us. Two ranks encode 2K in 40 ms, one in 66; 1080p in 25 ms instead of 27, but each must read the image first.
SPLIT_COSTS = SplitCosts(fixed=7600, exchanged=0.1, square=9500)

MAX_SPLIT_TOKENS = 64  # prompt tokens of a step; as tiles, few tokens with a long context would occupy one block per KV head

# Tiles of queries, in tiles of keys.
TILES_TO_START = 7  # overhead of an item
TILES_TO_MERGE = 7  # merge after the last part of a tile

MANY = 4  # items per block, assigned by cost to balance blocks


class Mixed(NamedTuple):
    """Parameters of concurrent prompts and decode rows."""

    keys_per_tile: int  # keys of one KV head that decode rows read while a block computes a tile
    enough: float  # share of the multiprocessors that saturates memory bandwidth


MIXED = {132: Mixed(97, 0.75)}  # by multiprocessors, like the step sizes; on other GPUs decode rows follow the prompts


class Cluster(NamedTuple):
    """Decode rows of one KV head: blocks that share its keys, and warps per block."""

    splits: int
    warps: int


FUSED_ROWS = 1  # maximum tokens of a step with fused attention
ANY_SPLITS = 8  # any GPU runs clusters of so many blocks
WHOLE_GPU = 114  # multiprocessors of an unpartitioned H100: it also runs larger clusters


def fused_cluster(kv_heads: int, group: int) -> Cluster:
    """Return the cluster for so many heads. With 16 query heads, registers limit a block to 8 warps."""
    if group <= 8 and kv_heads > 2:
        return Cluster(8, 8 if kv_heads > 4 else 16)
    return Cluster(16, 8)
