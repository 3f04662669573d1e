"""Measured numbers: on an H200, at the widths of the 8B model, with heads of 128 values. Tile sizes of a kernel are in its source."""

MAX_SPLIT_TOKENS = 64  # prompt tokens of a step; as tiles, few tokens with a long context would occupy one block per KV head

# Tiles of queries, in tiles of keys.
TILES_TO_START = 7  # overhead of an item
TILES_TO_MERGE = 7  # merge after the last part of a tile

MANY = 4  # items per block, assigned by cost to balance blocks


# Concurrent prompts and decode rows, by multiprocessors, like the step sizes (on other GPUs decode rows follow the prompts): keys of one KV
# head that decode rows read while a block computes a tile, and the share of the multiprocessors that saturates memory bandwidth.
MIXED = {132: (97, 0.75)}

FUSED_ROWS = 1  # maximum tokens of a step with fused attention
ANY_SPLITS = 8  # any GPU runs clusters of so many blocks
WHOLE_GPU = 114  # multiprocessors of an unpartitioned H100: it also runs larger clusters


def fused_cluster(kv_heads: int, group: int) -> tuple[int, int]:
    """Return the number of blocks that share the keys of a decode row's KV head, and of warps per block. With 16 query heads, registers
    limit a block to 8 warps."""
    if group <= 8 and kv_heads > 2:
        return 8, 8 if kv_heads > 4 else 16
    return 16, 8
