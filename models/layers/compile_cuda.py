"""Compiles our CUDA kernels with FlashInfer's machinery: at their first use, once per head size, kept where it keeps its own kernels."""

from functools import cache
from pathlib import Path
from typing import Any


@cache
def load_kernel(name: str, head_dim: int) -> Any:
    """What `name`.cu beside this file exports, for heads of `head_dim` values. RuntimeError if the compiler fails."""
    from flashinfer.jit import gen_jit_spec, sm90a_nvcc_flags  # which a CPU machine lacks

    flags = [*sm90a_nvcc_flags, f"-DHEAD_DIM={head_dim}"]
    return gen_jit_spec(f"{name}_{head_dim}", [Path(__file__).with_name(f"{name}.cu")], extra_cuda_cflags=flags).build_and_load()
