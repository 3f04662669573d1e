"""All-reduce of up to some thousand tokens in memory that the GPUs of a host map from each other; faster than NCCL there."""

import ctypes

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

MAX_TOKENS = 4096  # limit of a sum; NCCL is as fast with more
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of CUDA's driver interface


def peers_are_mapped(size: int) -> bool:
    """Return whether each of the first `size` GPUs can access every other's memory, including atomic operations, on which ranks wait."""
    pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
    return all(torch.cuda.can_device_access_peer(i, j) and _has_native_atomics(i, j) for i, j in pairs)


def _has_native_atomics(device: int, peer: int) -> bool:
    value = ctypes.c_int()
    status: int = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(value), NATIVE_ATOMICS, device, peer)
    return status == 0 and value.value == 1


class SymmetricSums:
    """See `SmallSums`. Collective: every rank creates one at the same time."""

    def __init__(self, group: dist.ProcessGroup, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = symmetric_memory.empty(MAX_TOKENS * width, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self._memory, group)
        self._group_name = group.group_name

    def buffer(self, num_tokens: int, width: int) -> torch.Tensor | None:
        size = num_tokens * width
        return self._memory[:size].view(num_tokens, width) if size <= len(self._memory) else None

    def sum_(self, x_TD: torch.Tensor) -> torch.Tensor:
        # Each rank sums a share of the values and distributes it, so all ranks get the same bits.
        torch.ops.symm_mem.two_shot_all_reduce_(x_TD, "sum", self._group_name)
        return x_TD
