"""What a model caches of a sequence, in groups of equal layers. Plain Python: pools, the memory plan and the scheduler's limits follow.

A layer finds its cache by its group and its ordinal there: in `[state, state, state, attention]` the attention is layer 0 of the paged
group.
"""

from dataclasses import dataclass

SPARE_ROWS = 2  # of states, for snapshots in the middle of a step: chunks that further ones of the same prompt follow


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Keys and values of every token in pages, of layers with equal heads; the heads of one rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class StateGroup:
    """A recurrent state of `layer_bytes` a row for each layer, however long the sequence is. A row that verifies drafts has `draft_bytes`
    more for each: what it is repeated from. See `models.cache.states`."""

    num_layers: int
    layer_bytes: int
    draft_bytes: int = 0

    @property
    def bytes_per_row(self) -> int:
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """All groups of one rank. A block of tokens is a page of each layer of `paged`; a snapshot of a row's states lies in blocks, too."""

    paged: PagedGroup
    states: tuple[StateGroup, ...] = ()

    @property
    def bytes_per_row(self) -> int:
        return sum(group.bytes_per_row for group in self.states)

    def row_bytes(self, num_drafts: int) -> int:
        """The same, with room for so many drafts."""
        return self.bytes_per_row + num_drafts * sum(group.num_layers * group.draft_bytes for group in self.states)

    def block_bytes(self, block_size: int) -> int:
        return block_size * self.paged.bytes_per_token

    def snapshot_blocks(self, block_size: int) -> int:
        """Blocks that hold a row's states; 0 for a model without any."""
        return -(-self.bytes_per_row // self.block_bytes(block_size))
