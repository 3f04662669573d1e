"""Compile the CUDA kernels of all published models into the package: `python -m models.kernels.hopper.build`. Needs the packages of the
extra `cuda` and a C++ compiler, no GPU."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

from models.kernels.hopper.compile import BUILT, built_path, kernels_of, spec_of
from models.kernels.hopper.toolkit import cuda_home

HEADS = (128, 72), (128, 64)  # values per head of decoder and tower


def build(kernel: tuple[str, int] | tuple[str, int, bool]) -> None:
    spec = spec_of(*kernel)
    spec.build()
    shutil.copy(spec.get_library_path(), built_path(*kernel))


def main() -> None:
    home = cuda_home()
    os.environ.update({"FLASHINFER_CUDA_ARCH_LIST": "9.0a"} | ({} if home is None else {"CUDA_HOME": str(home)}))
    shutil.rmtree(BUILT, ignore_errors=True)
    BUILT.mkdir()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, {kernel for heads in HEADS for kernel in kernels_of(*heads)} | {("flash_decoding", 128, True)}))


if __name__ == "__main__":
    main()
