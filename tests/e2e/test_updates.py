"""Weight updates of the whole engine: two ranks, both sources, and a trainer's loop."""

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from engine.worker import updates as groups
from models.demo import CHECKPOINT
from server.api.dialects.updates import WeightUpdates
from tests.e2e.serving import ROOT, Engine, doomed, serve
from tests.eventually import HANG_GUARD_S, eventually

pytestmark = pytest.mark.e2e

FLAGS = ("--enable-weight-updates", "--api-key", "k")
FILE = "model.safetensors"
BODY = {"prompt": "What number", "temperature": 0, "max_tokens": 12, "logprobs": 1, "ignore_eos": True}
Tensors = dict[str, torch.Tensor]


def ask(engine: Engine, **fields: Any) -> Any:
    response = engine.client.post("/v1/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def logprobs(engine: Engine) -> Any:
    return ask(engine)["choices"][0]["logprobs"]


def give(engine: Engine, path: str, body: Any = None, status: int = 200) -> Any:
    response = engine.client.post(path, json=body or {})
    assert response.status_code == status, response.text
    return response.json()


@contextlib.contextmanager
def alongside(call: Callable[[], object]) -> Iterator[None]:
    """Run `call` in a thread during the block, and wait for it."""
    thread = threading.Thread(target=call)
    thread.start()
    yield
    thread.join(HANG_GUARD_S)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def altered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with other weights."""
    folder = tmp_path_factory.mktemp("altered") / "demo"
    shutil.copytree(CHECKPOINT, folder)
    random = torch.Generator().manual_seed(0)
    tensors = {name: value * (1 + 0.2 * torch.rand(value.shape, generator=random)) for name, value in load_file(folder / FILE).items()}
    save_file({name: value.bfloat16() for name, value in tensors.items()}, folder / FILE)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def group_of(port: int, size: int, backend: str) -> dict[str, Any]:
    return {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size, "backend": backend}


def trainer(engine: Engine, size: int, backend: str = "gloo") -> Any:
    """Return the trainer's side of a group with all workers."""
    port = free_port()
    with alongside(lambda: give(engine, "/init_weights_update_group", group_of(port, size, backend))):
        return groups.join("weight_update_group", backend, "127.0.0.1", port, 0, size)


def announced(tensors: Tensors) -> dict[str, Any]:
    return {
        "names": list(tensors), "dtypes": [str(value.dtype) for value in tensors.values()],
        "shapes": [list(value.shape) for value in tensors.values()],
    }  # fmt: skip


def test_all_sources_on_two_ranks(altered: Path) -> None:
    """Log-probabilities are those of an engine that started with the weights."""
    first, second = load_file(CHECKPOINT / FILE), load_file(altered / FILE)
    with serve(altered, "--tp", "2") as fresh:
        expected = logprobs(fresh)
        assert "metadata" not in ask(fresh) and fresh.client.post("/pause_generation").status_code == 404
    with serve("demo", "--tp", "2", *FLAGS) as engine:
        assert engine.client.post("/pause_generation").status_code == 401
        engine.client.headers["authorization"] = "Bearer k"
        before = logprobs(engine)
        assert before != expected and ask(engine)["metadata"] == {"weight_version": "default"}

        give(engine, "/pause_generation")
        held: list[Any] = []
        with alongside(lambda: held.append(ask(engine))):
            eventually(lambda: engine.metric("vllm:num_requests_waiting") == 1, "a request that waits")
            assert give(engine, "/update_weights_from_disk", {"model_path": str(altered), "weight_version": "1"})["success"]
            refused = give(engine, "/update_weights_from_disk", {"model_path": str(altered.parent)}, 400)
            assert "no safetensors" in refused["error"]["message"] and str(altered.parent) not in refused["error"]["message"]
            assert not held
            give(engine, "/continue_generation")
        assert held[0]["choices"][0]["logprobs"] == logprobs(engine) == expected
        assert held[0]["metadata"] == {"weight_version": "1"}

        give(engine, "/update_weights_from_disk", {"model_path": str(CHECKPOINT), "weight_version": "2"})
        assert logprobs(engine) == before

        give(engine, "/update_weights_from_distributed", announced(second), 400)
        group = trainer(engine, 3)
        with alongside(lambda: give(engine, "/update_weights_from_distributed", {**announced(second), "weight_version": "3"})):
            for value in second.values():
                groups.broadcast(group, value)
        assert logprobs(engine) == expected
        some = dict(list(first.items())[:2])
        with alongside(lambda: give(engine, "/update_weights_from_distributed", announced(some))):
            for value in some.values():
                groups.broadcast(group, value)
        for _ in range(2):
            dist.destroy_process_group(group)
            group = trainer(engine, 3)
        dist.destroy_process_group(group)
        meta = give(engine, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}})["meta_info"]
        assert meta["weight_version"] == engine.client.get("/model_info").json()["weight_version"] == "3"
        routes = {route.path for route in WeightUpdates.__new__(WeightUpdates).routes()}
        assert routes < engine.client.get("/openapi.json").json()["paths"].keys()


DYING_TRAINER = """
import os, sys
from safetensors.torch import load_file
from engine.worker import updates as group
tensors = load_file(sys.argv[2])
joined = group.join("weight_update_group", "gloo", "127.0.0.1", int(sys.argv[1]), 0, 2)
sys.stdin.readline()
group.broadcast(joined, next(iter(tensors.values())))
os._exit(0)
"""


@pytest.mark.faults
def test_an_update_that_breaks_off_ends_the_engine() -> None:
    """The weights may be a mixture: no answer comes from them."""
    port, file = free_port(), CHECKPOINT / FILE
    with doomed("demo", *FLAGS) as engine:
        engine.client.headers["authorization"] = "Bearer k"
        command = [sys.executable, "-c", DYING_TRAINER, str(port), str(file)]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True) as process:
            give(engine, "/init_weights_update_group", group_of(port, 2, "gloo"))

            def update() -> None:
                with contextlib.suppress(httpx.HTTPError):
                    engine.client.post("/update_weights_from_distributed", json=announced(load_file(file)))

            with alongside(update):
                process.communicate("now\n", HANG_GUARD_S)
                assert engine.process.wait(HANG_GUARD_S) != 0
        assert "some weights were already replaced, so the engine exits" in engine.log()
        engine.assert_gone()


def test_the_trainer_of_the_guide() -> None:
    """Its model and the engine agree on log-probabilities before and after each update, and rewards grow."""
    page = (ROOT / "docs/guides/weight-updates.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"<!-- run -->\n```python\n(.*?)```", page, re.DOTALL)
    assert len(example.splitlines()) <= 40
    run = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    steps = [list(map(float, line.split())) for line in run.stdout.splitlines()]
    assert len(steps) == 6 and max(gap for _, _, gap in steps) < 1e-3
    assert steps[-1][1] > steps[0][1] + 0.1
