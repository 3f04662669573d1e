"""The 8B shape over two and four GPUs (NCCL) against one: teacher-forced logits in bfloat16."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from models.config.types import ModelConfig
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.backend import Backend
from models.kernels.choose import BackendName
from models.kernels.make import make_backend
from models.parallel.group import TensorParallel
from models.parallel.symmetric import SymmetricSums
from tests.gpu.generated import config_of, fill_generated
from tests.gpu.test_model_parity import PROMPTS, SHAPE, TOLERANCE
from tests.unit.models.harness import PagedRunner, Prompt, relative

pytestmark = [pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"), pytest.mark.timeout(600)]


def worker(rank: int, size: int, symmetric: bool, name: BackendName, config: ModelConfig, out: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    tp, backend = TensorParallel.single(), make_backend(name, device)
    if size > 1:
        dist.init_process_group("nccl", init_method=f"file://{out}/rendezvous-{size}", rank=rank, world_size=size)
        group = dist.group.WORLD
        assert group is not None
        sums = SymmetricSums(group, config.text.hidden_size, torch.bfloat16, device) if symmetric else None
        tp = TensorParallel(rank, size, group, sums, backend.exchange(group) if symmetric else None)
    with torch.inference_mode():
        model = Qwen3VL(config, tp, backend, torch.bfloat16)
        fill_generated(model)
        logits = teacher_forced(model, backend)
    if rank == 0:
        torch.save(logits.cpu(), out / f"{size}.pt")
    if size > 1:
        dist.destroy_process_group()


def teacher_forced(model: Qwen3VL, backend: Backend) -> torch.Tensor:
    logits = []
    for parts in PROMPTS.values():
        prompt = Prompt.build(model.config, parts)
        runner = PagedRunner(model, num_blocks=512, page_size=16, backend=backend)
        session = runner.start(prompt)
        half, total = len(prompt.ids) // 2, len(prompt.ids)
        logits += [runner.step([(session, count)], 1, want="all") for count in (half, total - half - 8)]
        logits += [runner.step([(session, 1)], 0) for _ in range(8)]
    return torch.cat(logits)


@pytest.fixture(scope="module")
def name(request: pytest.FixtureRequest) -> BackendName:
    chosen = request.config.getoption("--backend")
    return chosen


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return config_of(SHAPE, tmp_path_factory.mktemp(SHAPE))


@pytest.fixture(scope="module")
def one_rank(name: BackendName, config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    out = tmp_path_factory.mktemp("one")
    mp.spawn(worker, args=(1, False, name, config, out), nprocs=1)
    return torch.load(out / "1.pt")


@pytest.mark.parametrize(("size", "symmetric"), [(2, False), (2, True), (4, True)])
def test_logits_equal_those_of_one_gpu(
    name: BackendName, config: ModelConfig, one_rank: torch.Tensor, tmp_path: Path, size: int, symmetric: bool
) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    mp.spawn(worker, args=(size, symmetric, name, config, tmp_path), nprocs=size)
    assert relative(torch.load(tmp_path / f"{size}.pt"), one_rank) < TOLERANCE
