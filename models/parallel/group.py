"""Tensor-parallel group of ranks. Activations between layers are whole on every rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist


class SmallSums(Protocol):
    """All-reduce of few tokens, faster than the group's."""

    def buffer(self, num_tokens: int, width: int) -> torch.Tensor | None:
        """Return the (T, D) buffer for this rank's summands, used until the sum is read; None if it is too large."""

    def sum_(self, x_TD: torch.Tensor) -> torch.Tensor:
        """All-reduce the last result of `buffer` in place."""


class Exchange(Protocol):
    """Collectives of few values in one kernel each. Sums are bfloat16."""

    max_bytes: int  # limit per rank

    def add_sum_(self, stream_TD: torch.Tensor, parts_STD: torch.Tensor) -> None:
        """stream += the sum over S and the ranks."""

    def sum_(self, x_TD: torch.Tensor) -> torch.Tensor:
        """All-reduce in place."""

    def gather_columns(self, x_SN: torch.Tensor) -> torch.Tensor:
        """Gather (S, N) of each rank to (S, size * N) in rank order."""

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcast from rank 0 in place."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Rank `rank` of `size`. With one rank every collective is the identity and `group` is None."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    small_sums: SmallSums | None = None
    exchange: Exchange | None = None
    whole_experts: bool = False  # expert parallelism: whole experts instead of a share of each

    @classmethod
    def single(cls) -> "TensorParallel":
        return cls(rank=0, size=1, group=None)

    def share(self, total: int, what: str) -> int:
        """Return `total / size`. ValueError that names `what` if it is not divisible."""
        if total % self.size:
            raise ValueError(f"{what} ({total}) is not divisible by {self.size} tensor-parallel ranks")
        return total // self.size

    def own(self, size: int) -> slice:
        """Return this rank's part, where each rank has `size` rows or columns."""
        return slice(self.rank * size, (self.rank + 1) * size)

    def exchange_for(self, num_bytes: int) -> Exchange | None:
        """Return the exchange if each rank's part is small enough for it."""
        return self.exchange if self.exchange is not None and num_bytes <= self.exchange.max_bytes else None

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce in place."""
        if (exchange := self.exchange_for(x.nbytes)) is not None:
            return exchange.sum_(x)
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def sum_of(self, num_tokens: int, width: int, compute: Callable[[torch.Tensor | None], torch.Tensor]) -> torch.Tensor:
        """Return the sum over the ranks of the result of `compute(out)`, in `out` (T, D) if not None. Valid until the next call."""
        if self.small_sums is None or (buffer_TD := self.small_sums.buffer(num_tokens, width)) is None:
            return self.all_reduce_(compute(None))
        return self.small_sums.sum_(compute(buffer_TD))

    def sums_by_kernels(self, num_tokens: int, width: int) -> bool:
        """Return whether `sum_of` only launches kernels, whose arguments are the same in each call."""
        is_small = self.exchange_for(num_tokens * width * torch.bfloat16.itemsize) is not None
        return self.size == 1 or is_small or (self.small_sums is not None and self.small_sums.buffer(num_tokens, width) is not None)

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcast from rank 0 in place."""
        if (exchange := self.exchange_for(x.nbytes)) is not None:
            return exchange.broadcast_(x)
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=0)
        return x

    def warm_up(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Run each collective once for one token and for so many: NCCL's first call of a kind and size takes a second and memory."""
        for count in (1, num_tokens) if self.size > 1 else ():
            x = torch.zeros((count, width), dtype=dtype, device=device)
            for tp in (self, replace(self, exchange=None)):
                tp.broadcast_(tp.all_reduce_(x))
                tp.all_gather_columns(x)
            self.all_gather_rows(x, [count] * self.size)
            self.all_to_all_rows(x.expand(self.size, -1, -1).flatten(0, 1), [count] * self.size, [count] * self.size)

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Gather (S, n) of each rank to (S, size * n) in rank order."""
        if self.size == 1:
            return x
        if (exchange := self.exchange_for(x.nbytes)) is not None:
            return exchange.gather_columns(x)
        gathered = x.new_empty((self.size * x.shape[0], x.shape[1]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self.group)
        return gathered.view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Gather (counts[rank], ...) of each rank to (sum(counts), ...) in rank order. Every rank knows all counts."""
        if self.size == 1:
            return x
        longest = max(counts)
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: x.shape[0]] = x
        gathered = x.new_empty((self.size * longest, *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        return torch.cat([gathered[rank * longest : rank * longest + count] for rank, count in enumerate(counts)])

    def all_to_all_rows(self, x: torch.Tensor, to: Sequence[int], of: Sequence[int]) -> torch.Tensor:
        """Send the next `to[rank]` rows of x (sum(to), ...) to each rank; return (sum(of), ...), `of[rank]` rows of each in rank order."""
        received = x.new_empty((sum(of), *x.shape[1:]))
        dist.all_to_all_single(received, x.contiguous(), list(of), list(to), group=self.group)
        return received


def kv_heads_of(num_kv_heads: int, tp: TensorParallel) -> tuple[int, int]:
    """Return (first KV head, number of KV heads) of this rank. With more ranks than heads a head is replicated on size / heads ranks."""
    if tp.size <= num_kv_heads:
        count = tp.share(num_kv_heads, "num_key_value_heads")
        return tp.rank * count, count
    if tp.size % num_kv_heads:
        raise ValueError(f"{tp.size} tensor-parallel ranks are not a multiple of num_key_value_heads ({num_kv_heads})")
    return tp.rank * num_kv_heads // tp.size, 1
