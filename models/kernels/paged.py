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


class HostPlan(Protocol):
    """Attention whose plan is arrays made on the host, which its user brings to the device."""

    def plan_arrays(self, layout: AttentionLayout) -> tuple[Int32s, ...]:
        """What the next run reads beside the layout's pages. Touches no device, changes nothing."""

    def read_from(self, plan: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
        """From now on runs take arrays of `plan_arrays`, and the layout's pages, from these tensors."""


class FixedAttention(AttentionBackend, HostPlan, Protocol):
    """A backend of a fixed shape for a CUDA graph: what `read_from` was given before the capture is filled before each replay. The shapes
    of `plan_arrays` are the same for all layouts of the shape."""

    @property
    def max_pages(self) -> int:
        """Of a layout."""


MakeFixed = Callable[[int, int, int], FixedAttention]  # by prompt tokens, decode rows, and rows of the prompt tokens


def plan_on_device(part: HostPlan, layout: AttentionLayout) -> None:
    """Plans a step that no graph replays."""
    part.read_from([to_device(array, layout.pages.device) for array in part.plan_arrays(layout)], layout.pages)


def allocate_pools(group: PagedGroup, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device) -> list[KVPool]:
    """One (k, v) pair for each layer of the group, zeros: a page that was never written must not hold NaN."""
    assert group.dtype_bytes == dtype.itemsize
    shape = num_blocks, page_size, group.num_kv_heads, group.head_dim
    pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * group.num_layers)]
    return list(zip(pools[::2], pools[1::2], strict=True))
