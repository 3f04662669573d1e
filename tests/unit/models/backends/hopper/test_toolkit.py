"""CUDA's compiler as wheels: they are found before a system's, and lie as FlashInfer wants them."""

import subprocess
import sys
from pathlib import Path

import pytest

from models.kernels.hopper import toolkit


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "site/nvidia/cu13"
    for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib/libcudart.so.13"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    return home


def test_a_folder_as_the_installer_makes_it(wheels: Path, tmp_path: Path) -> None:
    home = toolkit.cuda_home(tmp_path / "cache")
    assert home is not None and home == toolkit.cuda_home(tmp_path / "cache")
    assert (home / "bin/nvcc").read_text() == "bin/nvcc" and (home / "include/cuda.h").is_file() and (home / "nvvm/bin/cicc").is_file()
    assert (home / "lib64/libcudart.so").resolve() == wheels / "lib/libcudart.so.13"
    described = subprocess.run(["readelf", "-d", home / "lib64/stubs/libcuda.so"], capture_output=True, text=True, check=True).stdout
    assert "libcuda.so.1" in described
    assert toolkit.has_compiler()


def test_without_wheels_the_system_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolkit, "find_spec", lambda name: None)
    monkeypatch.setattr(toolkit, "NVCC", tmp_path / "nvcc")
    monkeypatch.setattr(toolkit.shutil, "which", lambda name: None)
    assert toolkit.cuda_home(tmp_path) is None and not toolkit.has_compiler()
    (tmp_path / "nvcc").touch()
    assert toolkit.has_compiler()
