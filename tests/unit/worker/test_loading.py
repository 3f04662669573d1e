"""Kernels are made while weights are read: what is said meanwhile, and how an error comes out."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.ipc import Child
from engine.worker.build import compiling
from models.config import ModelConfig
from models.scaffold import SHAPES, write_model_folder


class SlowBackend:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.go, self.heads = threading.Event(), (0, 0)
        self.problem: Exception | None = None

    def load(self, text_head_dim: int, vision_head_dim: int) -> None:
        self.go.wait(10)
        self.heads = text_head_dim, vision_head_dim
        if self.problem is not None:
            raise self.problem


@pytest.fixture
def child(tmp_path: Path) -> Child:
    made = Child.__new__(Child)  # without its sockets
    made.role, made.run_dir = "worker-3", str(tmp_path)
    return made


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    folder = tmp_path / "model"
    write_model_folder(folder, SHAPES["tiny"], weights="none", seed=0)
    return ModelConfig.from_folder(folder)


@pytest.mark.parametrize("problem", [None, RuntimeError("nvcc fails")])
def test_others_hear_that_kernels_are_compiled(child: Child, config: ModelConfig, problem: Exception | None) -> None:
    """Red if the start waits for a compiler before it reads weights, if `/health` cannot know, or if an error is lost in the thread."""
    backend = SlowBackend()
    backend.problem = problem
    assert not child.is_compiling()
    with pytest.raises(RuntimeError, match="nvcc fails") if problem else nullcontext(), compiling(child, cast(Any, backend), config):
        assert child.is_compiling() and backend.heads == (0, 0)
        backend.go.set()
    assert not child.is_compiling()
    assert backend.heads == (config.text.head_dim, config.vision.head_dim)
