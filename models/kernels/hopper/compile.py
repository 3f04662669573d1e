"""Our CUDA kernels: of the package, if `build.py` compiled them there, or compiled with FlashInfer's JIT, which caches them."""

import hashlib
import logging
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from models.kernels.hopper.toolkit import nvcc_release

logger = logging.getLogger(__name__)

FUSED_HEAD_DIM = 128  # the only one that `fused_decoding.cu` supports
NO_HEADS = 0  # for a kernel independent of heads
PRODUCTS = "few_rows", "float8_gemv", "int4_gemv"
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"  # FlashInfer's other flags for it double the time of compilation
BUILT = Path(__file__).with_name("built")  # NAME.KEY.so


@cache
def load_kernel(name: str, head_dim: int, is_float8: bool = False) -> Any:
    """Return the module of `name`.cu for heads of `head_dim` values or NO_HEADS, and for a cache in float8. RuntimeError if the compiler
    fails."""
    path = built_path(name, head_dim, is_float8)
    if not path.exists():
        return spec_of(name, head_dim, is_float8).build_and_load()
    import tvm_ffi  # not available on a CPU machine, as FlashInfer

    return tvm_ffi.load_module(str(path))


def spec_of(name: str, head_dim: int, is_float8: bool = False) -> Any:
    """Return FlashInfer's description of a kernel's compilation."""
    from flashinfer.jit import gen_jit_spec

    define = [f"-DHEAD_DIM={head_dim}"] * (head_dim != NO_HEADS) + ["-DFLOAT8"] * is_float8
    made = built_path(name, head_dim, is_float8).name.split(".")[0]
    return gen_jit_spec(made, [Path(__file__).with_name(f"{name}.cu")], extra_cuda_cflags=[ARCHITECTURE, *define])


def built_path(name: str, head_dim: int, is_float8: bool = False) -> Path:
    """Return the path of a compiled kernel in the package."""
    return BUILT / f"{name}{f'_{head_dim}' * (head_dim != NO_HEADS)}{'_float8' * is_float8}.{build_key()}.so"


@cache
def build_key() -> str:
    """Return what compiled kernels depend on: sources, releases of CUDA's compiler and of tvm-ffi's ABI, kind of processor. Log kernels of
    the package that have another key."""
    texts = [path.read_bytes() for path in [*sorted(BUILT.parent.glob("*.cu*")), Path(__file__)]]
    abi = "_".join(version("apache-tvm-ffi").split(".")[:2])
    key = f"{hashlib.sha256(b''.join(texts)).hexdigest()[:16]}-{nvcc_release()}-{abi}-{platform.machine()}"
    if others := {path.name.split(".")[1] for path in BUILT.glob("*.so")} - {key}:
        logger.info("CUDA kernels are compiled now: those of the package are for %s, not %s", ", ".join(others), key)
    return key


def kernels_of(text_head_dim: int, vision_head_dim: int) -> list[tuple[str, int]]:
    """Return the kernels of a model. NO_HEADS: the decoder's attention is that of `portable`, or there is no tower."""
    names = ["prefill_attention", "flash_decoding"] if text_head_dim else []
    names += ["fused_decoding"] if text_head_dim == FUSED_HEAD_DIM else []
    kernels = [*((name, text_head_dim) for name in names), *((name, NO_HEADS) for name in PRODUCTS)]
    return kernels + ([("varlen_attention", vision_head_dim)] if vision_head_dim else [])


def load_kernels(text_head_dim: int, vision_head_dim: int) -> None:
    """Load or compile all kernels of a model concurrently."""
    build_key()  # logs once
    kernels = kernels_of(text_head_dim, vision_head_dim)
    with ThreadPoolExecutor(len(kernels)) as pool:
        list(pool.map(lambda kernel: load_kernel(*kernel), kernels))
