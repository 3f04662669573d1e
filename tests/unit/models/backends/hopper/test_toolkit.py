"""CUDA's compiler as wheels: they are found before a system's, and lie as FlashInfer wants them. Kernels of the package are used if their
key fits."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.kernels.hopper import compile, toolkit


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
    assert toolkit.find_nvcc() == wheels / "bin/nvcc"


def test_without_wheels_the_system_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolkit, "find_spec", lambda name: None)
    monkeypatch.setattr(toolkit, "NVCC", tmp_path / "nvcc")
    monkeypatch.setattr(toolkit.shutil, "which", lambda name: None)
    assert toolkit.cuda_home(tmp_path) is None and toolkit.find_nvcc() is None
    assert toolkit.nvcc_release() == "none"
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88")
    (tmp_path / "nvcc").chmod(0o700)
    assert toolkit.find_nvcc() == tmp_path / "nvcc" and toolkit.nvcc_release() == "13_0"


def test_kernels_of_the_package_are_used_only_with_their_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key changes with a source, the compiler's release, the ABI and the processor."""
    source, loaded = tmp_path / "few_rows.cu", []
    source.write_text("void run();")
    (tmp_path / "built").mkdir()
    monkeypatch.setattr(compile, "BUILT", tmp_path / "built")
    monkeypatch.setattr(compile, "nvcc_release", lambda: "13_0")
    monkeypatch.setattr("tvm_ffi.load_module", lambda path: loaded.append(path) or "built")
    monkeypatch.setattr(compile, "spec_of", lambda name, *_: SimpleNamespace(build_and_load=lambda: f"compiled {name}"))
    caplog.set_level(logging.INFO)

    def load(name: str = "few_rows", head_dim: int = compile.NO_HEADS) -> object:
        compile.load_kernel.cache_clear()
        compile.build_key.cache_clear()
        return compile.load_kernel(name, head_dim)

    assert load() == "compiled few_rows" and not caplog.records
    path = compile.built_path("few_rows", compile.NO_HEADS)
    path.touch()
    assert load() == "built" and loaded == [str(path)]
    assert load("flash_decoding", 64) == "compiled flash_decoding" and not caplog.records
    changes = [
        lambda patch: patch.setattr(compile, "nvcc_release", lambda: "12_8"),
        lambda patch: patch.setattr(compile, "version", lambda name: "0.2.0"),
        lambda patch: patch.setattr(compile.platform, "machine", lambda: "aarch64"),
        lambda patch: source.write_text("void run(int);"),
    ]
    for number, change in enumerate(changes, 1):
        with monkeypatch.context() as patch:
            change(patch)
            assert load() == "compiled few_rows" and len(caplog.records) == number
