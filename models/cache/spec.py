"""Specification of a model's per-sequence cache, in groups of equal layers. Plain Python.

The group of a layer and its ordinal in the group identify its cache: in `[state, state, state, attention]` the attention is layer 0 of
the paged group.
"""

from dataclasses import dataclass

SPARE_ROWS = 2  # states for snapshots in the middle of a step: chunks followed by another chunk of the same prompt


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
    """Recurrent state of `layer_bytes` per row and layer, independent of the sequence length. Each token that is verified adds
    `replay_bytes`, from which it can be replayed. See `models.cache.states`."""

    num_layers: int
    layer_bytes: int
    replay_bytes: int = 0

    @property
    def bytes_per_row(self) -> int:
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """All groups of one rank. A block is a page of each layer of `paged`; snapshots of states are also stored in blocks."""

    paged: PagedGroup
    states: tuple[StateGroup, ...] = ()

    @property
    def bytes_per_row(self) -> int:
        return sum(group.bytes_per_row for group in self.states)

    def row_bytes(self, num_verified: int) -> int:
        """Return the bytes of a row's states with space to replay so many tokens."""
        return self.bytes_per_row + num_verified * sum(group.num_layers * group.replay_bytes for group in self.states)

    def block_bytes(self, block_size: int) -> int:
        return block_size * self.paged.bytes_per_token

    def snapshot_blocks(self, block_size: int) -> int:
        """Return the number of blocks of a row's states; 0 for a model without states."""
        return -(-self.bytes_per_row // self.block_bytes(block_size))
