"""The wheel alone, installed apart from any clone, serves the demo by its command."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import ROOT, SMALL
from tests.eventually import HANG_GUARD_S
from tests.unit.engine.test_children import DECOY, NAMES

pytestmark = pytest.mark.packaging

PLATFORM, KERNEL = "manylinux_2_35_x86_64", "few_rows.key.so"
BUILD = f"from setuptools import build_meta as b; print(b.build_wheel('dist', {{'--build-option': '--plat-name={PLATFORM}'}}))"
SHIPPED = ("engine", "server", "models", "bench", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree, target = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("installed")
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    built = tree / "models/kernels/hopper/built"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir()
    (built / KERNEL).write_bytes(b"")
    subprocess.run([sys.executable, "-c", BUILD], cwd=tree, check=True, capture_output=True)
    wheel = next((tree / "dist").glob(f"*-py3-none-{PLATFORM}.whl"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(pip, check=True, capture_output=True)
    return target


def test_the_installed_command_serves_the_demo(installed: Path, tmp_path: Path) -> None:
    hopper = [f"models/kernels/hopper/{name}" for name in ("flash_decoding.cu", "hopper_attention.cuh", f"built/{KERNEL}")]
    for needed in (*hopper, "bench/load.py"):
        assert (installed / needed).exists(), needed
    assert not [name for name in ("tests", "docs", "deploy", "bench/results", "bench/demo_training") if (installed / name).exists()]
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(DECOY)
    command = installed / "bin" / "mini-vlm"
    environment = dict(os.environ) | {"PYTHONPATH": str(installed)}
    flags = ["serve", "--port", "0", "--device", "cpu", *SMALL]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([command, *flags], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert "ready after" in ready, (tmp_path / "log").read_text()
        url = ready.split(": ")[1].split()[0]
        page = httpx.get(url)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(HANG_GUARD_S)
    assert page.status_code == 200 and answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
    assert code == 0 and str(ROOT) not in (tmp_path / "log").read_text()
