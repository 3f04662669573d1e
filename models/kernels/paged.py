"""Causal attention over a paged KV cache, behind one Protocol."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from models.cache.layout import AttentionLayout
from models.cache.spec import PagedGroup
from models.kernels.ops import KVPool, NewHeads
from models.kernels.transfers import to_device

Int32s = npt.NDArray[np.int32]


class AttentionBackend(Protocol):
    """Owns the KV pools of a paged group; a layer is named by its ordinal there.

    Once a step: `plan`; then in each layer: keys and values go into `pool(layer)`, then `run`.
    """

    def plan(self, layout: AttentionLayout) -> None:
        """Takes the rows and pages of the next step. Host work and copies only; not part of a captured graph."""

    def pool(self, layer: int) -> KVPool:
        """Where the layer's keys and values are written, at the layout's slots."""

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        """(T, H, K) rotated queries -> (T, H, K). Row r attends to its `kv_lens_cpu[r]` cached tokens, causal, aligned to the end. Query
        heads share KV heads in groups; the scale is K ** -0.5. The step's keys must be in the pool."""


@runtime_checkable
class FusedAttention(AttentionBackend, Protocol):
    def run_fused(self, layer: int, heads: NewHeads) -> torch.Tensor:
        """What `Ops.norm_rope_store_` does, then `run`."""


class Piece(Protocol):
    """A kernel's part of a step's attention: some of the tokens, by a plan that is one array."""

    def plan(self, layout: AttentionLayout, before: Sequence[Int32s]) -> Int32s:
        """What `launch` reads in addition to the layout's pages. `before`: the plans of the step's pieces that come first. Touches no
        device. For a CUDA graph its shape is that of any layout of the graph's shape."""

    def launch(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor, plan: torch.Tensor, pages: torch.Tensor) -> None:
        """Writes the results of its tokens."""


class PagedAttention:
    """See `AttentionBackend`: pools, and the pieces that compute a step. For a CUDA graph: what `read_from` was given before the capture
    is filled before each replay, from `plan_arrays` and with at most `max_pages` pages."""

    def __init__(self, pools: Sequence[KVPool], pieces: Sequence[Piece], max_pages: int) -> None:
        self.max_pages = max_pages
        self._pools, self._pieces = pools, pieces
        self._plans: Sequence[torch.Tensor] = ()
        self._pages = torch.zeros(0, dtype=torch.int32, device=pools[0][0].device)

    def plan(self, layout: AttentionLayout) -> None:
        """For a step that no graph replays."""
        self.read_from([to_device(array, layout.pages.device) for array in self.plan_arrays(layout)], layout.pages)

    def plan_arrays(self, layout: AttentionLayout) -> tuple[Int32s, ...]:
        """What the next run reads in addition to the layout's pages. Touches no device, changes nothing."""
        assert len(layout.pages) <= self.max_pages, f"{len(layout.pages)} pages are more than {self.max_pages}"
        arrays: list[Int32s] = []
        for piece in self._pieces:
            arrays.append(piece.plan(layout, arrays))
        return tuple(arrays)

    def read_from(self, plans: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
        """From now on runs take arrays of `plan_arrays`, and the layout's pages, from these tensors."""
        self._plans, self._pages = plans, pages

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        out_THK = torch.empty_like(q_THK)
        for piece, plan in zip(self._pieces, self._plans, strict=True):
            piece.launch(layer, q_THK, out_THK, plan, self._pages)
        return out_THK


class EagerAttention:
    """See `AttentionBackend`: for steps of any mix, outside CUDA graphs. `make` chooses the pieces of each."""

    def __init__(self, pools: Sequence[KVPool], make: Callable[[AttentionLayout], PagedAttention]) -> None:
        self._pools, self._make = pools, make
        self._planned: PagedAttention | None = None

    def plan(self, layout: AttentionLayout) -> None:
        self._planned = self._make(layout)
        self._planned.plan(layout)

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        assert self._planned is not None
        return self._planned.run(layer, q_THK)


MakeFixed = Callable[[int, int, int], PagedAttention]  # by prompt tokens, decode rows, and rows of the prompt tokens


def allocate_pools(group: PagedGroup, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device) -> list[KVPool]:
    """One (k, v) pair for each layer of the group, zeros: a page that was never written must not hold NaN."""
    assert group.dtype_bytes == dtype.itemsize
    shape = num_blocks, page_size, group.num_kv_heads, group.head_dim
    pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * group.num_layers)]
    return list(zip(pools[::2], pools[1::2], strict=True))
