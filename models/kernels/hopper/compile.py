"""Compilation of our CUDA kernels with FlashInfer's JIT, which caches them."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

FUSED_HEAD_DIM = 128  # the only one that `fused_decoding.cu` supports
NO_HEADS = 0  # for a kernel independent of heads
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"  # FlashInfer's other flags for it double the time of compilation


@cache
def load_kernel(name: str, head_dim: int, is_float8: bool = False) -> Any:
    """Return the module of `name`.cu for heads of `head_dim` values or NO_HEADS, and for a cache in float8. RuntimeError if the compiler
    fails."""
    from flashinfer.jit import gen_jit_spec  # not available on a CPU machine

    made, define = (name, []) if head_dim == NO_HEADS else (f"{name}_{head_dim}", [f"-DHEAD_DIM={head_dim}"])
    if is_float8:
        made, define = f"{made}_float8", [*define, "-DFLOAT8"]
    source = Path(__file__).with_name(f"{name}.cu")
    return gen_jit_spec(made, [source], extra_cuda_cflags=[ARCHITECTURE, *define]).build_and_load()


def load_kernels(text_head_dim: int, vision_head_dim: int) -> None:
    """Compile all kernels of a model concurrently. NO_HEADS: the decoder's attention is that of `portable`, or there is no
    tower."""
    names = ["prefill_attention", "flash_decoding"] if text_head_dim else []
    names += ["fused_decoding"] if text_head_dim == FUSED_HEAD_DIM else []
    kernels = [*((name, text_head_dim) for name in names), *((name, NO_HEADS) for name in ("few_rows", "float8_gemv", "int4_gemv"))]
    kernels += [("varlen_attention", vision_head_dim)] if vision_head_dim else []
    with ThreadPoolExecutor(len(kernels)) as pool:
        list(pool.map(lambda kernel: load_kernel(*kernel), kernels))
