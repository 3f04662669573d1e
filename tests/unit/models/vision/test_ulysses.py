"""Images over all ranks: which are worth it, and that every rank's part is that of one rank's tower."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.wire.messages import Encode, ImageSource, Prefetch, Region
from engine.worker.images import ImageCache
from models.checkpoint.load import load_weights
from models.config.huggingface import read_config
from models.decoders.qwen3_vl import Qwen3VL
from models.parallel.group import TensorParallel
from models.vision.shares import Shares, UlyssesCosts, share_out
from tests.unit.models.harness import TORCH
from tests.unit.models.ranks import start_ranks

Places = tuple[int, ...]
COSTS = UlyssesCosts(fixed=10, exchanged=0.25, square=10**9)
SIZES = [(64, 64), (96, 160), (224, 64), (128, 128), (32, 96), (64, 96)]  # pixels; the last is a frame pair


@pytest.mark.parametrize(
    ("patches", "size", "together", "alone"),
    [
        ([], 2, (), ((), ())),
        ([100], 1, (), ((0,),)),
        ([100], 2, (0,), ((), ())),
        ([30], 2, (), ((0,), ())),  # 30 against 10 + 15 + 7.5
        ([100, 100], 2, (), ((0,), (1,))),
        ([100, 400], 2, (1, 0), ((), ())),  # 385; the small one alone: 410
        ([100, 100, 100], 2, (0,), ((1,), (2,))),
        ([100, 10, 10], 2, (0,), ((1,), (2,))),
        ([100, 90, 20, 20], 4, (), ((0,), (1,), (2,), (3,))),  # both together: 125
    ],
)
def test_the_slowest_rank_is_done_soonest(patches: list[int], size: int, together: Places, alone: tuple[Places, ...]) -> None:
    assert share_out(patches, size, COSTS) == Shares(together, alone)


def pictures() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    *images, pair = [torch.randint(256, (*size, 6), dtype=torch.uint8, generator=random) for size in SIZES]
    return [*(image[..., :3] for image in images), torch.stack(pair.split(3, dim=-1))]


class Pictures:
    def read(self, sources: list[ImageSource]) -> list[torch.Tensor | None]:
        known: list[torch.Tensor | None] = [*pictures(), None]
        return [known[source.region.offset] for source in sources]

    def read_copy(self, source: ImageSource) -> tuple[torch.Tensor, bytes]:
        return pictures()[source.region.offset], b""


def encodes_of(model: Qwen3VL, numbers: list[int]) -> list[Encode]:
    sizes = [*SIZES, (64, 64)]
    return [
        Encode(
            number,
            ImageSource("rgb", Region(1, number, 0), *sizes[number], num_frames=1 + (number == PAIR)),
            model.config.geometry.grid(*sizes[number]),
        )
        for number in numbers
    ]


PAIR, DAMAGED = 5, 6
CASES = [[0], [1, 2], [0, 1, 2], [3, 1, 4, 0], [0, 1, 2, 3, 4], [1, DAMAGED, 0], [PAIR], [2, PAIR, DAMAGED]]


def worker(rank: int, size: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=size)
    config, tp = read_config(folder), TensorParallel(rank, size, dist.group.WORLD)
    model = Qwen3VL(config, tp, TORCH, torch.float32)
    load_weights(model, folder, lambda done, total: None)
    found = []
    for costs in (UlyssesCosts(0, 0.0, 10**9), UlyssesCosts(30, 0.1, 10**9), None):
        for numbers in CASES:
            cache = ImageCache(model.tower, Pictures(), tp, ulysses_costs=costs)  # type: ignore[arg-type]
            with torch.inference_mode():
                encoded = cache.encode(encodes_of(model, numbers))
            cache.prefetch(Prefetch(ImageSource("rgb", Region(1, 3, 0), 128, 128), (1, 8, 8)))
            is_shared = bool(share_out([64], size, costs).together)
            assert (cache._early is None) == is_shared  # everybody waits for the plan
            found.append((cache.tensors, encoded.failed))
    torch.save(found, out / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_embeddings_equal_those_of_one_rank(tiny: Qwen3VL, tiny_folder: Path, tmp_path: Path, size: int) -> None:
    start_ranks(worker, size, tiny_folder, tmp_path)
    with torch.inference_mode():
        expected = [
            tiny.tower.encode([image], [tiny.config.geometry.grid(*size)])[0] for image, size in zip(pictures(), SIZES, strict=True)
        ]
    of_ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for case, of_case in enumerate(zip(*of_ranks, strict=True)):
        numbers = CASES[case % len(CASES)]
        assert any(DAMAGED in failed for _, failed in of_case) == (DAMAGED in numbers)
        for tensors, _ in of_case:
            assert tensors.keys() == set(numbers)
            for number in numbers:
                if number < len(expected):
                    torch.testing.assert_close(tensors[number], expected[number], rtol=1e-5, atol=1e-5)
