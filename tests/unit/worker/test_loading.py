"""Kernels are made while weights are read: what is said meanwhile, and how an error comes out. What a GPU without float8 does."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.config import EngineConfig
from engine.ipc import Child
from engine.worker.build import compiling, load_model
from models.config.huggingface import read_config
from models.config.types import ModelConfig
from models.kernels.heads import Heads
from models.kernels.reference.backend import TorchBackend
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder


class SlowBackend:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.go = threading.Event()
        self.heads: tuple[Heads, int] | None = None
        self.problem: Exception | None = None

    def load(self, heads: Heads, vision_head_dim: int) -> None:
        self.go.wait(10)
        self.heads = heads, vision_head_dim
        if self.problem is not None:
            raise self.problem


@pytest.fixture
def child(tmp_path: Path) -> Child:
    made = Child.__new__(Child)  # without its sockets
    made.role, made.run_dir, made.config = "worker-3", str(tmp_path), EngineConfig()
    return made


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    folder = tmp_path / "model"
    write_model_folder(folder, SHAPES["tiny"], weights="none", seed=0)
    return read_config(folder)


@pytest.mark.parametrize("problem", [None, RuntimeError("nvcc fails")])
def test_others_hear_that_kernels_are_compiled(child: Child, config: ModelConfig, problem: Exception | None) -> None:
    """Red if weights wait for the compiler, or if its error is lost in the thread."""
    backend = SlowBackend()
    backend.problem = problem
    assert not child.is_compiling()
    with pytest.raises(RuntimeError, match="nvcc fails") if problem else nullcontext(), compiling(child, cast(Any, backend), config):
        assert child.is_compiling() and backend.heads is None
        backend.go.set()
    assert not child.is_compiling()
    assert backend.heads == (config.text.heads(1), config.vision.head_dim)


class OldBackend(TorchBackend):
    has_float8 = False


def test_float8_is_refused_where_it_does_not_run(child: Child, config: ModelConfig) -> None:
    child.config = EngineConfig(load_format="dummy", quantization="fp8")
    with pytest.raises(ValueError, match=r"compute capability 8\.9"):
        load_model(child, config, TensorParallel.single(), OldBackend(torch.device("cpu")), torch.float32)


@torch.inference_mode()
@pytest.mark.parametrize("backend", [TorchBackend, OldBackend])
def test_guesses_are_in_float8_where_it_runs(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: type[TorchBackend]
) -> None:
    write_model_folder(tmp_path, SHAPES["3.5-tiny"], weights="none", seed=0)
    child.config = EngineConfig(load_format="dummy")
    monkeypatch.setattr(child, "progress", lambda text: None)
    found = read_config(tmp_path, with_head=True)
    model = load_model(child, found, TensorParallel.single(), backend(torch.device("cpu")), torch.float32)
    dict(model.named_modules())["lm_head"].weight.zero_()
    assert model.drafter is not None
    guesses_S = model.drafter.guesses(torch.randn((8, found.text.hidden_size)))
    assert bool(guesses_S.any()) == backend.has_float8
