"""What a step may take of a GPU: told from made-up segments as torch's allocator lists them."""

import sys

import torch

from engine.worker.memory import StepMemory, idle_bytes_of_graphs


def segment(device: int, pool: tuple[int, int], total: int, allocated: int) -> dict[str, object]:
    return {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}


def test_what_lies_idle_in_pools_of_graphs_is_nobodys() -> None:
    """Steps cannot have it."""
    default, step_graphs, tower_graphs = (0, 0), (0, 1), (0, 2)
    segments = [
        segment(0, default, 1000, 100),
        segment(0, step_graphs, 500, 20),
        segment(0, tower_graphs, 300, 300),
        segment(0, tower_graphs, 50, 10),
        segment(1, step_graphs, 700, 0),
    ]
    assert idle_bytes_of_graphs(segments, 0) == 480 + 40
    assert idle_bytes_of_graphs(segments, 1) == 700


def test_a_cpu_is_not_counted() -> None:
    memory = StepMemory(torch.device("cpu"))
    memory.note_graphs()
    assert memory.free_bytes() == sys.maxsize
