"""Causal attention over a paged KV cache: protocol and composition of kernels."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from models.cache.layout import AttentionLayout
from models.cache.spec import PagedGroup
from models.kernels.ops import FLOAT8, KVPool, NewHeads
from models.kernels.transfers import to_device

Int32s = npt.NDArray[np.int32]


class AttentionBackend(Protocol):
    """Owner of the KV pools of a paged group; layers are identified by their ordinals in it.

    Call `plan` once per step; then, for each layer, write keys and values to `pool(layer)` and call `run`.
    """

    def plan(self, layout: AttentionLayout) -> None:
        """Plan the rows and pages of the next step. Host work and copies only; not part of a captured graph."""

    def pool(self, layer: int) -> KVPool:
        """Return the layer's key and value pools, written at the layout's slots."""

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        """Map rotated queries to (T, H, K). Row r attends to its `kv_lens_cpu[r]` cached tokens, causal, aligned to the end. Query
        heads share KV heads in groups; the scale is K ** -0.5. The step's keys must be in the pool."""


@runtime_checkable
class FusedAttention(AttentionBackend, Protocol):
    def run_fused(self, layer: int, heads: NewHeads) -> torch.Tensor:
        """Run `Ops.norm_rope_store_`, then `run`, in one kernel if available."""


class Piece(Protocol):
    """A kernel's part of a step's attention: some of the tokens, with a plan of one array."""

    def plan(self, layout: AttentionLayout, before: Sequence[Int32s]) -> Int32s:
        """Return the array that `launch` reads in addition to the layout's pages. `before`: plans of the step's previous pieces. Host only.
        Its shape depends only on the shape of a CUDA graph."""

    def launch(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor, plan: torch.Tensor, pages: torch.Tensor) -> None:
        """Write the results of this piece's tokens."""


class PagedAttention:
    """See `AttentionBackend`: pools, and the pieces that compute a step. With a CUDA graph, the tensors given to `read_from` before the
    capture are filled before each replay from `plan_arrays`, with at most `max_pages` pages."""

    def __init__(self, pools: Sequence[KVPool], pieces: Sequence[Piece], max_pages: int) -> None:
        self.max_pages = max_pages
        self._pools, self._pieces = pools, pieces
        self._plans: Sequence[torch.Tensor] = ()
        self._pages = torch.zeros(0, dtype=torch.int32, device=pools[0][0].device)

    def plan(self, layout: AttentionLayout) -> None:
        """Plan a step without a graph."""
        self.read_from([to_device(array, layout.pages.device) for array in self.plan_arrays(layout)], layout.pages)

    def plan_arrays(self, layout: AttentionLayout) -> tuple[Int32s, ...]:
        """Return the arrays that the next run reads in addition to the layout's pages. Host only, without side effects."""
        assert len(layout.pages) <= self.max_pages, f"{len(layout.pages)} pages are more than {self.max_pages}"
        arrays: list[Int32s] = []
        for piece in self._pieces:
            arrays.append(piece.plan(layout, arrays))
        return tuple(arrays)

    def read_from(self, plans: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
        """Make later runs read the arrays of `plan_arrays` and the layout's pages from these tensors."""
        self._plans, self._pages = plans, pages

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        out_THK = torch.empty_like(q_THK)
        for piece, plan in zip(self._pieces, self._plans, strict=True):
            piece.launch(layer, q_THK, out_THK, plan, self._pages)
        return out_THK


class EagerAttention(PagedAttention):
    """Attention for any mix of rows, outside CUDA graphs: `choose` returns the pieces of a step."""

    def __init__(self, pools: Sequence[KVPool], choose: Callable[[AttentionLayout], Sequence[Piece]]) -> None:
        super().__init__(pools, [], max_pages=0)
        self.choose = choose

    def plan(self, layout: AttentionLayout) -> None:
        self._pieces, self.max_pages = self.choose(layout), len(layout.pages)
        super().plan(layout)


MakeFixed = Callable[[int], PagedAttention]  # by decode rows


def allocate_pools(group: PagedGroup, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device) -> list[KVPool]:
    """Return a zeroed (k, v) pair per layer of the group, in float8 if it has a byte per value: pages that were never written must not
    contain NaN."""
    dtype = FLOAT8 if group.dtype_bytes == 1 else dtype
    assert group.dtype_bytes == dtype.itemsize
    shape = num_blocks, page_size, group.num_kv_heads, group.head_dim
    pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * group.num_layers)]
    return list(zip(pools[::2], pools[1::2], strict=True))
