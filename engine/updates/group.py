"""A process group of a trainer (rank 0) and the workers of engines. It is created like SGLang's `init_custom_process_group`, so that
trainers with support for SGLang can join it."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(seconds=300)


def join(name: str, backend: str, address: str, port: int, rank: int, size: int) -> dist.ProcessGroup:
    """Return the group when all ranks have joined; rank 0 listens at the address. RuntimeError or ValueError after the timeout."""
    host = f"[{address}]" if ":" in address else address
    store, _, _ = next(rendezvous(f"tcp://{host}:{port}", rank, size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    group, _ = _new_process_group_helper(size, rank, [], backend, dist.PrefixStore(name, store), GroupName(name), timeout=TIMEOUT)
    dist.distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}  # for the functions of torch.distributed
    return group


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Broadcast rank 0's tensor to all ranks, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor], options).wait()
