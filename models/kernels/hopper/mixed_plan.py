"""Division of multiprocessors between attention of prompts and of decode rows."""

import numpy as np

from models.cache.layout import AttentionLayout
from models.kernels.hopper.tuned import MANY, MIXED, TILES_TO_MERGE, TILES_TO_START
from models.kernels.paged import Int32s


def prefill_blocks(layout: AttentionLayout, tiles: Int32s, kv_heads: int, tile_keys: int, num_blocks: int) -> int:
    """Return how many of `num_blocks`, one per multiprocessor, compute the prefill rows so that both parts take the least time; all blocks
    if running the decode rows afterwards is as fast, or if there are no measurements for so many multiprocessors."""
    costs, mixed = -(-tiles[:, 3] // tile_keys) + TILES_TO_START, MIXED.get(num_blocks)
    if not len(costs) or mixed is None:
        return num_blocks
    blocks = np.arange(1, num_blocks + 1)
    items = kv_heads * len(costs) / blocks
    whole = np.maximum(np.where(items > MANY, items, np.ceil(items)) * costs.mean(), costs.max())
    prompts = np.minimum(whole, items * costs.mean() + TILES_TO_START + TILES_TO_MERGE)  # the second if some are cut
    keys_per_tile, enough = mixed
    decodes = kv_heads * int(layout.kv_lens_cpu[layout.num_prefill_rows :].sum()) / keys_per_tile
    times = np.maximum(prompts, decodes / np.clip(num_blocks - blocks, 1, enough * num_blocks))
    times[-1] = prompts[-1] + decodes / (enough * num_blocks)
    return num_blocks if times[-1] <= times.min() else int(times.argmin()) + 1
