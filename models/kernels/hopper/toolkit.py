"""Location of CUDA's compiler: wheels of this environment (extra `cuda`), then the system's, which may not match torch. Needs no torch.

Wheels lack names that a linker needs, so FlashInfer gets a folder of links:

    bin, include, nvvm  ->  the wheels'        lib64/libcudart.so  ->  the wheels' libcudart.so.13        lib64/stubs/libcuda.so: empty
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

NVCC = Path("/usr/local/cuda/bin/nvcc")  # default of CUDA's installer
CACHE = Path("~/.cache/mini-vlm-engine")
LINKED = ("bin", "include", "nvvm")


def wheel_home() -> Path | None:
    """Return the folder shared by the wheels of CUDA 13, if they include the compiler."""
    spec = find_spec("nvidia")
    paths = () if spec is None else spec.submodule_search_locations or ()
    return next((home for path in paths if (home := Path(path, "cu13")).joinpath("bin", "nvcc").is_file()), None)


def find_nvcc() -> Path | None:
    """Return the path of the compiler."""
    wheels, found = wheel_home(), Path(shutil.which("nvcc") or NVCC)
    return wheels / "bin/nvcc" if wheels else found if found.exists() else None


def nvcc_release() -> str:
    """Return the compiler's release such as "13_0"; "none" without one."""
    nvcc = find_nvcc()
    text = "" if nvcc is None else subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    return next(iter(re.findall(r"release ([\d.]+)", text)), "none").replace(".", "_")


def cuda_home(cache: Path = CACHE) -> Path | None:
    """Return a folder for CUDA_HOME, None without wheels. It is the same for the same wheels, so that nothing is compiled twice.

    OSError if it cannot be created, or if there is no C++ compiler."""
    wheels = wheel_home()
    if wheels is None:
        return None
    home = cache.expanduser() / f"cuda-{hashlib.sha256(str(wheels).encode()).hexdigest()[:16]}"
    stub = home / "lib64/stubs/libcuda.so"
    if stub.exists():
        return home
    stub.parent.mkdir(parents=True, exist_ok=True)
    links = {name: wheels / name for name in LINKED} | {"lib64/libcudart.so": min(wheels.glob("lib/libcudart.so.*"))}
    for name, target in links.items():
        with contextlib.suppress(FileExistsError):  # another engine may start concurrently
            (home / name).symlink_to(target)
    building = stub.with_suffix(f".{os.getpid()}")
    command = ["c++", "-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-x", "c++", "/dev/null", "-o", str(building)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except subprocess.CalledProcessError as problem:
        raise OSError(f"c++ cannot link: {problem.stderr.decode(errors='replace')[:200]}") from None
    building.replace(stub)
    return home
