"""A step with random data and its attention by torch in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from models.cache.layout import AttentionLayout
from models.kernels.ops import KVPool
from models.kernels.reference.attention import TorchAttention

NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass
class Step:
    """Random queries and keys of rows of these lengths. What no row owns is NaN: whoever reads it will be seen."""

    pool: KVPool
    layout: AttentionLayout
    q: torch.Tensor

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        heads: tuple[int, int],
        head_dim: int = 16,
        page: int = 16,
        seed: int = 0,
        tokens: Sequence[int] | None = None,
    ) -> "Step":
        num_tokens = [1] * len(lengths) if tokens is None else tokens
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // page) for length in lengths]
        num_heads, kv_heads = heads
        free = torch.randperm(sum(counts) + 3, generator=generator)
        pool = tuple(torch.full((len(free), page, kv_heads, head_dim), torch.nan) for _ in range(2))
        parts = [part.clone() for part in free[: sum(counts)].split(counts)]
        for part, length in zip(parts, lengths, strict=True):
            for tensor in pool:
                flat = tensor[part].flatten(0, 1)
                flat[:length] = torch.randn((length, kv_heads, head_dim), generator=generator)
                tensor[part] = flat.view(-1, *tensor.shape[1:])
        pages = torch.cat(parts).int()
        num_prefill_rows = 0 if tokens is None else len(tokens)
        layout = AttentionLayout(indptr(num_tokens), torch.tensor(lengths).int(), indptr(counts), pages, NOTHING, num_prefill_rows)
        return cls((pool[0], pool[1]), layout, torch.randn((sum(num_tokens), num_heads, head_dim), generator=generator))

    def to(self, device: torch.device, dtype: torch.dtype) -> "Step":
        layout = replace(self.layout, pages=self.layout.pages.to(device))
        return Step((self.pool[0].to(device, dtype), self.pool[1].to(device, dtype)), layout, self.q.to(device, dtype))

    def with_finite_values(self) -> "Step":
        """With 1000 for NaN, but for keys: some backends multiply values that they read too much by 0, as `Ops.norm_rope_store_` allows."""
        return replace(self, pool=(self.pool[0], self.pool[1].nan_to_num(nan=1e3)))

    def expected(self) -> torch.Tensor:
        reference = TorchAttention([(self.pool[0].double(), self.pool[1].double())])
        reference.plan(self.layout)
        return reference.run(0, self.q.double())


def indptr(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def layout_of(prompts: Sequence[tuple[int, int]], decodes: Sequence[int] = ()) -> AttentionLayout:
    lengths = [new + before for new, before in prompts] + [*decodes]
    pages, tokens = indptr([-(-length // 16) for length in lengths]), indptr([new for new, _ in prompts] + [1] * len(decodes))
    return AttentionLayout(tokens, indptr(lengths).diff(), pages, torch.arange(int(pages[-1])).int(), NOTHING, len(prompts))
