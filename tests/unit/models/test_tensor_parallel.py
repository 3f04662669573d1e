"""Two and four real processes (gloo, rendezvous through a file) give the logits of one."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from models.checkpoint.load import load_weights
from models.config.huggingface import read_config
from models.config.types import ModelConfig
from models.decoders.qwen3_vl import Qwen3VL
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder
from tests.unit.models import qwen3_5_checkpoints
from tests.unit.models.harness import SEVERAL_TURNS, TORCH, PagedRunner, Prompt, load, make, relative
from tests.unit.models.ranks import start_ranks


def all_logits(model: Qwen3VL) -> torch.Tensor:
    prompt = Prompt.build(model.config, SEVERAL_TURNS)
    runner = PagedRunner(model)
    session = runner.start(prompt)
    runner.step([(session, 50)], 1, want="none")
    parts = [runner.step([(session, count)], 1, want="all") for count in (70, len(prompt.ids) - 120)]
    for token in (5, 6, 7):
        session.ids.append(token)
        parts.append(runner.step([(session, 1)], 0))
    return torch.cat(parts)


class OneRoom:
    def __init__(self, width: int) -> None:
        self._memory = torch.full((40 * width,), torch.nan)

    def buffer(self, num_tokens: int, width: int) -> torch.Tensor | None:
        size = num_tokens * width
        return self._memory[:size].view(num_tokens, width) if size <= len(self._memory) else None

    def sum_(self, x_TD: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x_TD)
        return x_TD


class ByGloo:
    def __init__(self, config: ModelConfig) -> None:
        self.max_bytes = 4 * config.text.vocab_size
        self.used: set[str] = set()

    def add_sum_(self, stream_TD: torch.Tensor, parts_STD: torch.Tensor) -> None:
        self.used.add("add_sum_")
        summed_TD = parts_STD.sum(0)
        dist.all_reduce(summed_TD)
        stream_TD += summed_TD

    def sum_(self, x_TD: torch.Tensor) -> torch.Tensor:
        self.used.add("sum_")
        dist.all_reduce(x_TD)
        return x_TD

    def gather_columns(self, x_SN: torch.Tensor) -> torch.Tensor:
        self.used.add("gather_columns")
        parts = [torch.empty_like(x_SN) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x_SN)
        return torch.cat(parts, dim=1)

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        self.used.add("broadcast_")
        dist.broadcast(x, 0)
        return x


def worker(rank: int, size: int, folder: Path, out: Path, whole_experts: bool = False) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=size)
    config = read_config(folder)
    exchange = ByGloo(config) if size == 4 else None
    tp = TensorParallel(rank, size, dist.group.WORLD, OneRoom(config.text.hidden_size) if size == 2 else None, exchange, whole_experts)
    model = make(config, tp)
    load_weights(model, folder, lambda done, total: None)
    rows = tp.all_gather_rows(torch.full((rank + 1, 2), float(rank)), counts=range(1, size + 1))
    assert rows[:, 0].tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    assert tp.broadcast_(torch.tensor([rank + 7])).tolist() == [7]
    tp.warm_up(5, 3, torch.float32, torch.device("cpu"))
    torch.save(all_logits(model), out / f"{rank}.pt")
    assert exchange is None or exchange.used == {"add_sum_", "sum_", "gather_columns", "broadcast_"}
    dist.destroy_process_group()


def check(model: Qwen3VL, folder: Path, out: Path, size: int, tolerance: float = 1e-5, whole_experts: bool = False) -> None:
    start_ranks(worker, size, folder, out, whole_experts)
    expected = all_logits(model)
    for rank in range(size):
        assert relative(torch.load(out / f"{rank}.pt"), expected) < tolerance


def test_float8_logits_equal_those_of_one_rank(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "fp8", SHAPES["tiny"], weights="random", seed=1, format="float8")
    check(load(tmp_path / "fp8"), tmp_path / "fp8", tmp_path, 2, 1.5e-2)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_logits_equal_those_of_one_rank(tiny: Qwen3VL, tiny_folder: Path, tmp_path: Path, size: int) -> None:
    check(tiny, tiny_folder, tmp_path, size)


@pytest.mark.parametrize(
    ("size", "is_sparse", "whole"), [pytest.param(2, False, False, marks=pytest.mark.nightly), (4, True, False), (2, True, True)]
)
def test_hybrid_logits_equal_those_of_one_rank(tmp_path: Path, size: int, is_sparse: bool, whole: bool) -> None:
    folder = tmp_path / "hybrid"
    heads = {"num_attention_heads": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8} if size == 4 else {}
    qwen3_5_checkpoints.write(folder, is_sparse, **heads)
    check(load(folder), folder, tmp_path, size, whole_experts=whole)


def test_what_does_not_divide_is_a_value_error(tiny: Qwen3VL) -> None:
    with pytest.raises(ValueError, match=r"vocab_size \(4096\) is not divisible by 3"):
        Qwen3VL(tiny.config, TensorParallel(0, 3, None), TORCH, torch.float32)
