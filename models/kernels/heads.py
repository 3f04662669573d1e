"""Attention heads that the kernels of each backend support. Plain Python, used by the launcher before anything is loaded."""

from dataclasses import dataclass

MAX_GROUP = 16  # query heads that share a KV head; they are rows of one matrix product
HOPPER_GROUPS = (1, 2, 4, 8, 16)  # these divide a tile's rows evenly
HOPPER_DIMS = (64, 128)


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a decoder layer on one rank."""

    num_queries: int
    num_kv: int
    dim: int
    rotary_dim: int  # rotated values of a head

    def __str__(self) -> str:
        return f"{self.num_queries} query heads on {self.num_kv} KV heads of {self.dim} values, {self.rotary_dim} of them rotated"


def hopper_takes(heads: Heads) -> bool:
    """Return whether our CUDA kernels support these heads; otherwise `hopper` uses the attention of `portable`."""
    group, rest = divmod(heads.num_queries, heads.num_kv)
    return not rest and group in HOPPER_GROUPS and heads.dim in HOPPER_DIMS


def portable_lack(heads: Heads) -> str:
    """Return what our Triton kernels lack for these heads, as words that follow the backend's name, or an empty string."""
    group, rest = divmod(heads.num_queries, heads.num_kv)
    powers = all(16 <= size == 1 << (size.bit_length() - 1) for size in (heads.dim, heads.rotary_dim))
    if powers and not rest and group <= MAX_GROUP:
        return ""
    return f"needs heads and rotated parts of a power of two, 16 or more, and up to {MAX_GROUP} query heads per KV head, not {heads}"
