"""Collectives of few values over real GPUs: eager and in graphs, with ranks that come late and early."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from models.kernels.choose import BackendName
from models.kernels.make import make_backend
from tests.unit.models.backends.portable.test_exchange import assert_right

pytestmark = [pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"), pytest.mark.timeout(120)]

SIZE = 2
ROUNDS = 300
REPLAYS = 50
LATE_CYCLES = 100_000  # 50 us: longer than a rank polls without naps
SHAPES = [(1, 4096), (2, 5120), (48, 5120)]


def worker(rank: int, name: BackendName, folder: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SIZE)
    group = dist.group.WORLD
    assert group is not None
    exchange = make_backend(name, device).exchange(group)
    assert exchange is not None
    late = random.Random(rank)  # not the same on both
    assert_right(exchange, rank, SIZE, device, ROUNDS, lambda: torch.cuda._sleep(late.choice([1, 1, LATE_CYCLES])))
    streams = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in SHAPES]
    parts = [torch.full((1, *shape), rank + 1.0, dtype=torch.bfloat16, device=device) for shape in SHAPES]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for stream, part in zip(streams, parts, strict=True):
            exchange.add_sum_(stream, part)
    for _ in range(REPLAYS):
        torch.cuda._sleep(late.choice([1, LATE_CYCLES]))
        graph.replay()
    assert all(torch.equal(stream, torch.full_like(stream, 3.0 * REPLAYS)) for stream in streams)
    dist.barrier(group, device_ids=[rank])
    dist.destroy_process_group()


def test_every_rank_gets_what_the_other_has(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    mp.spawn(worker, args=(request.config.getoption("--backend"), tmp_path), nprocs=SIZE)
