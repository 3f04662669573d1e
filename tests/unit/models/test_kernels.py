"""The Triton kernels in Triton's interpreter against plain torch. Red when an index, a weight or a half of a pair is mixed up."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

from models.layers.ops_torch import TorchOps

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # has to be set before triton is imported, so in a process of its own
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_kernels_in_the_interpreter starts")


@pytest.mark.skipif(INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_in_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout + run.stderr


@interpreted
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), [(8, 2, 128), (4, 4, 32), (6, 2, 16), (3, 1, 16), (16, 8, 16)])
def test_norm_rope_store(num_heads: int, kv_heads: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    count, blocks, page = 7, 5, 4

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    qkv, angles = normal(count, (num_heads + 2 * kv_heads) * head_dim), normal(count, head_dim // 2)
    tables = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots = torch.randperm(blocks * page, generator=generator)[:count]
    args = (normal(head_dim), normal(head_dim), 1e-3, tables)
    pools = [(torch.zeros(blocks, page, kv_heads, head_dim), torch.zeros(blocks, page, kv_heads, head_dim)) for _ in range(2)]
    expected = TorchOps().norm_rope_store_(qkv.clone(), *args, pools[0], slots)
    from models.layers import kernels

    ours = kernels.norm_rope_store(qkv, *args, pools[1], slots)
    for got, wanted in ((ours, expected), (pools[1][0], pools[0][0]), (pools[1][1], pools[0][1])):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("head_dim", [72, 64, 16])
def test_rotate_vision(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn((2, 5, 3, 3, head_dim), generator=generator)
    angles = torch.rand((5, head_dim // 2), generator=generator) * 2 * math.pi
    tables = torch.cat((angles.cos(), angles.sin()), dim=-1)
    expected = qkv.clone()
    TorchOps().rotate_vision_(expected, tables)
    from models.layers import kernels

    kernels.rotate_vision_(qkv, tables)
    torch.testing.assert_close(qkv, expected, rtol=1e-5, atol=1e-5)
