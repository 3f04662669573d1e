"""What a model caches of a sequence, layer by layer. Plain Python: pools, the memory plan and the scheduler's limits follow from it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of every token, in pages; the heads of one rank."""

    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class RowState:
    """A recurrent state of so many bytes a row, however long its sequence is.

    The layer finds it by the step's row ids (`ForwardBatch.rows`), reads it before a row's first token of the step and leaves in it what
    holds behind the last one. Nobody clears it: a row begins, also anew after a preemption, where all three positions of its first token
    are 0, and what is in the state then is another sequence's.
    """

    num_bytes: int


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One entry a layer, on one rank."""

    layers: tuple[PagedKV | RowState, ...]

    @property
    def paged(self) -> tuple[PagedKV, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, PagedKV))

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Of a row, for each layer that has a state. Where there is one, a cached prefix cannot be gone on from: there is no snapshot."""
        return tuple(layer.num_bytes for layer in self.layers if isinstance(layer, RowState))

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.paged)
