"""Choice of a backend from the driver's list of GPUs and the installed packages.

| backend  | device                      | needs                                                            |
|----------|-----------------------------|------------------------------------------------------------------|
| hopper   | compute capability 9.0      | Triton, FlashInfer (which compiles our CUDA sources), nvcc, g++   |
| portable | compute capability >= 8.0   | Triton and a C compiler                                          |
| torch    | CPU, or any of these GPUs   | torch: the reference, not fast                                   |
"""

import ctypes
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast, get_args

from models.kernels.heads import Heads, portable_lack
from models.kernels.hopper.toolkit import find_nvcc

BackendName = Literal["hopper", "portable", "torch"]
DeviceName = Literal["cuda", "cpu"]

HOPPER = (9, 0)
OLDEST = (8, 0)  # bfloat16 on tensor cores
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_* of CUDA's driver interface


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    total_memory: int  # bytes

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen backend. `note`: a line for the user, or empty."""

    backend: BackendName
    device: DeviceName
    note: str = ""


def list_gpus() -> list[Gpu]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_describe(cuda, index) for index in range(count.value)]


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    numbers = []
    for attribute in (MAJOR, MINOR):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        numbers.append(value.value)
    return Gpu(name.value.decode(errors="replace"), (numbers[0], numbers[1]), memory.value)


def choose(requested: str, device: str, tp: int, is_demo: bool, gpus: list[Gpu]) -> Choice:
    """Return the backend for these flags; `auto` selects the best one that works. ValueError with one line if there is none."""
    if device == "cpu" or (device == "auto" and not gpus):
        if requested not in ("auto", "torch"):
            raise ValueError(f"--backend {requested} needs a GPU: " + ("--device is cpu" if device == "cpu" else "none was found"))
        return Choice("torch", "cpu")
    used = gpus[:tp]
    problem = _problem_of_gpus(used, tp)
    if problem and requested == "auto" and device == "auto" and is_demo:
        return Choice("torch", "cpu", f"serving on the CPU: {problem}")
    if problem:
        raise ValueError(problem)
    if requested != "auto":
        lack = _lack_of(requested, used)
        if lack:
            raise ValueError(f"--backend {requested} {lack}")
        return Choice(cast(BackendName, requested), "cuda")
    lacks: dict[BackendName, str] = {name: _lack_of(name, used) for name in get_args(BackendName)}
    best = next(name for name, lack in lacks.items() if not lack)
    wanted: BackendName = "hopper" if all(gpu.capability == HOPPER for gpu in used) else "portable"
    note = f"serving with --backend {best}; the faster --backend {wanted} {lacks[wanted]}" if lacks[wanted] else ""
    return Choice(best, "cuda", note)


def suit(choice: Choice, requested: str, heads: Heads, dtype: str) -> Choice:
    """Return the chosen backend, `portable` instead of `hopper` in float32, if it supports a decoder's heads, otherwise torch with `auto`.
    ValueError if it was requested."""
    if choice.backend == "hopper" and dtype == "float32":  # our CUDA kernels compute in bfloat16
        choice = Choice("portable", choice.device, "serving with --backend portable: --backend hopper does not compute in float32")
    lack = "" if choice.backend == "torch" else portable_lack(heads)  # `hopper` uses these kernels, too
    if lack and requested != "auto":
        raise ValueError(f"--backend {requested} {lack}")
    return Choice("torch", choice.device, f"serving with --backend torch; the faster --backend {choice.backend} {lack}") if lack else choice


def has_jpeg_decoder() -> bool:
    return find_spec("nvidia") is not None and find_spec("nvidia.nvimgcodec") is not None


def gpu_decodes_jpegs(choice: Choice) -> bool:
    """Return whether the workers' GPUs decode baseline JPEGs instead of their hosts."""
    return choice.device == "cuda" and choice.backend != "torch" and has_jpeg_decoder()


def _problem_of_gpus(gpus: list[Gpu], tp: int) -> str | None:
    if len(gpus) < tp:
        return f"--tp {tp} needs as many GPUs; there {'is' if len(gpus) == 1 else 'are'} {len(gpus) or 'none'}"
    old = next((gpu for gpu in gpus if gpu.capability < OLDEST), None)
    if old is not None:
        return f"{old} is too old: compute capability 8.0 or newer is needed"
    if not _torch_has_cuda():
        return "the installed torch is built for CPUs: install one that is built for CUDA"
    return None


def _lack_of(backend: str, gpus: list[Gpu]) -> str:
    """Return what a backend lacks, as words after its name."""
    if backend == "torch":
        return ""
    if backend == "hopper" and (other := next((gpu for gpu in gpus if gpu.capability != HOPPER), None)):
        return f"needs GPUs of compute capability 9.0, not {other}"
    if find_spec("triton") is None:
        return "needs the package triton, which comes with torch for CUDA"
    if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        return "needs a C compiler and Python's headers for Triton (packages gcc and python3-dev)"
    if backend == "hopper" and find_spec("flashinfer") is None:
        return 'needs the package flashinfer-python: pip install -e ".[cuda]"'
    if backend == "hopper" and find_nvcc() is None:
        return "needs CUDA's compiler, which the extra [cuda] brings"
    if backend == "hopper" and not (shutil.which("c++") or shutil.which("g++")):
        return "needs a C++ compiler (package g++)"
    return ""


def _torch_has_cuda() -> bool:
    """Inspect torch's files: importing it takes seconds."""
    spec = find_spec("torch")
    return spec is not None and spec.origin is not None and any(Path(spec.origin).parent.glob("lib/libtorch_cuda*"))
