"""A process group of a trainer (rank 0) and the workers of engines. It is created like SGLang's `init_custom_process_group`, so that
trainers with support for SGLang can join it."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper
from torch.distributed.rendezvous import rendezvous

TIMEOUT_S = 300


def join(name: str, backend: str, address: str, port: int, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> dist.ProcessGroup:
    """Return the group when all ranks have joined; rank 0 listens at the address. RuntimeError or ValueError after the timeout."""
    timeout = timedelta(seconds=timeout_s)
    host = f"[{address}]" if ":" in address else address
    store, _, _ = next(rendezvous(f"tcp://{host}:{port}", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(size, rank, [], backend, dist.PrefixStore(name, store), GroupName(name), timeout=timeout)
    dist.distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}  # for the functions of torch.distributed
    return group


def leave(group: dist.ProcessGroup) -> None:
    dist.destroy_process_group(group)


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Broadcast rank 0's tensor to all ranks, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor], options).wait()
