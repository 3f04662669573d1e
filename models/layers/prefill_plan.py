"""How the attention of chunks of prompts is cut into tiles and dealt to the blocks of `prefill_attention.cu`. Called by `prefill_cuda`."""

import numpy as np
import numpy.typing as npt

from models.batch import AttentionLayout
from models.layers.attention import Int32s
from models.layers.split_plan import max_token_groups, token_groups

ITEM_FIELDS = 8  # aligned pieces of memory


def plan_items(layout: AttentionLayout, kv_heads: int, tile_tokens: int, tile_keys: int, num_blocks: int) -> Int32s:
    """(1 + n, ITEM_FIELDS): a header that begins with n and `num_blocks`, then n items. Block b computes b, b + num_blocks and so on.

    An item is a KV head with up to `tile_tokens` neighbouring tokens of a row: first token, number of tokens, offset of the row's pages,
    end of the last token's keys, KV head. The token before the last sees one key less, and so on. An item's cost is its tiles of
    `tile_keys` keys; no two blocks differ by more than the largest cost. Rows without tokens have no items.
    """
    tiles = token_groups(layout, tile_tokens)
    tiles = tiles[np.argsort(tiles[:, 3] // -tile_keys, kind="stable")]
    order = deal(len(tiles) * kv_heads, num_blocks)
    items = np.zeros((1 + len(order), ITEM_FIELDS), dtype=np.int32)
    items[0, :2] = len(order), num_blocks
    items[1:, :4] = tiles[order // kv_heads]
    items[1:, 4] = order % kv_heads
    return items


def num_blocks_of(items: Int32s) -> int:
    """For how many blocks they were planned."""
    return int(items[0, 1])


def max_items(num_tokens: int, num_rows: int, kv_heads: int, tile_tokens: int) -> int:
    """So many are enough for `num_tokens` in `num_rows` rows, however they are spread."""
    return max_token_groups(num_tokens, num_rows, tile_tokens) * kv_heads


def deal(count: int, num_blocks: int) -> npt.NDArray[np.int64]:
    """Deals 0, 1, ..., count - 1 to blocks in rounds that go back and forth; the last one, which may be short, goes forth.

    Of things sorted by cost, whoever gets the dearer one of a round gets the cheaper one of the next.
    """
    order = np.arange(count)
    rounds = order[: (count - 1) // num_blocks * num_blocks].reshape(-1, num_blocks)  # without the last
    rounds[::-2] = rounds[::-2, ::-1]
    return order
