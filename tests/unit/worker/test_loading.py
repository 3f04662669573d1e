"""The start of a worker, and its staging buffers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed

from engine.wire.child import Child
from engine.wire.config import EngineConfig
from engine.worker import build
from engine.worker.build import load_model
from engine.worker.failure import explain
from engine.worker.staging import Staging, staged_bytes
from models.config.huggingface import read_config
from models.config.schemes import Rule
from models.config.types import ModelConfig
from models.kernels.reference.backend import TorchBackend
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder
from tests.unit.worker.in_process import CPU


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


class OldBackend(TorchBackend):
    def runs(self, format: str) -> bool:
        return format != "float8"


class OtherBackend(TorchBackend):
    name = "portable"


def test_formats_are_refused_where_they_do_not_run(child: Child, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed, low_bit = (replace(config, text=replace(config.text, rules=(Rule(".*mlp.*", format),))) for format in ("float8", "int4-g32-awq"))
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    for model, quantization, backend, words in (
        (config, "fp8", OldBackend, r"compute capability 8\.9"),
        (mixed, None, OldBackend, r"compute capability 8\.9"),
        (mixed, None, OtherBackend, "--dtype float32 needs --backend torch"),
        (low_bit, None, OtherBackend, "int4-g32 matrices are multiplied in bfloat16"),
    ):
        child.config = EngineConfig(load_format="dummy", quantization=quantization)
        with pytest.raises(ValueError, match=words):
            load_model(child, model, TensorParallel.single(), backend(torch.device("cpu")), torch.float32)
    with pytest.raises(ValueError, match=r'need the package humming-kernels: pip install -e "\.\[cuda\]"'):
        load_model(child, low_bit, TensorParallel.single(), OtherBackend(torch.device("cpu")), torch.bfloat16)


CASES = [
    (ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer"), ["flashinfer", "pip install", "--device cpu"]),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), ["--gpu-memory-utilization", "Tried to allocate"]),
    (torch.distributed.DistBackendError("NCCL error in: x.cpp:3, system error\nLast error:\nno route"), ["NCCL_DEBUG", "system error"]),
    (RuntimeError(), ["RuntimeError"]),
]


def test_one_line_that_says_what_to_do() -> None:
    for problem, words in CASES:
        line = explain(problem)
        assert "\n" not in line and len(line) < 500 and all(word in line for word in words), line


ARRAYS = [
    np.arange(5),
    np.arange(12, dtype=np.float32).reshape(3, 4).T,
    np.zeros((3, 0), dtype=np.int64),
    np.broadcast_to(np.int32(7), (2, 3)),
    np.arange(40, dtype=np.int32)[::2],
]


def test_arrays_keep_types_shapes_and_places() -> None:
    staging = Staging(staged_bytes(ARRAYS), CPU)
    addresses = []
    for step in range(2):
        staging.begin()
        tensors = [staging.put(array + array.dtype.type(step)) for array in ARRAYS]
        staging.copy()
        for tensor, array in zip(tensors, ARRAYS, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array + step)
            assert tensor.numpy().dtype == array.dtype and tensor.is_contiguous()
        addresses.append([tensor.data_ptr() for tensor in tensors])
    assert addresses[0] == addresses[1]
