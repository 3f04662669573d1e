"""Weight updates on GPUs: decoder and tower of 8B with few layers, through graphs, against an engine that starts with the new weights."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.worker import updates as groups
from models.scaffold import SHAPES, write_model_folder
from tests.e2e.serving import Engine, image_part, picture, serve, text_part
from tests.e2e.test_updates import alongside, announced, give, trainer

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

SHAPE = replace(SHAPES["8B"], layers=4, vocab_size=4096, num_base_tokens=4000, vision_depth=6, deepstack=(1, 3, 5))
FILE = "model.safetensors"
FLAGS = ("--enable-weight-updates", "--api-key", "k", "--max-model-len", "4096", "--gpu-memory-utilization", "0.5")
REPEATED = 4  # until a graph of the tower is captured while the engine is idle


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("updates")
    write_model_folder(folder / "first", SHAPE, weights="random", seed=0)
    shutil.copytree(folder / "first", folder / "second")
    tensors = load_file(folder / "first" / FILE)
    save_file({name: tensor.roll(1, 0) * 1.25 for name, tensor in tensors.items()}, folder / "second" / FILE)
    return folder / "first", folder / "second"


def start(folder: Path, *flags: str) -> Any:
    return serve(folder, *FLAGS, *flags, is_small=False)


def seen(engine: Engine) -> list[dict[str, float]]:
    """Log-probabilities of an answer to a picture and of one to a text; the picture is encoded again and again, at last by a graph."""
    engine.client.headers["authorization"] = "Bearer k"
    parts = [image_part(picture(1, 320, 256)), text_part("What is it?")]
    found = []
    for content in [parts] * REPEATED + ["Hello"]:
        engine.client.post("/flush_cache")
        body = {"logprobs": True, "top_logprobs": 5, "max_tokens": 8, "ignore_eos": True}
        choice = engine.chat(content, **body).json()["choices"][0]
        found.append({token["token"] + str(place): token["logprob"] for place, token in enumerate(choice["logprobs"]["content"])})
    return found[-2:]


def assert_equal(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert [one.keys() for one in ours] == [one.keys() for one in theirs]
    assert max(abs(one[token] - other[token]) for one, other in zip(ours, theirs, strict=True) for token in one) < 2e-2


@pytest.mark.parametrize("flags", [(), ("--quantization", "fp8")], ids=["bfloat16", "float8"])
def test_from_disk(folders: tuple[Path, Path], flags: tuple[str, ...]) -> None:
    first, second = folders
    with start(second, *flags) as fresh:
        expected = seen(fresh)
    with start(first, *flags) as engine:
        before = seen(engine)
        assert before != expected
        give(engine, "/update_weights_from_disk", {"model_path": str(second)})
        assert_equal(seen(engine), expected)
        free = torch.cuda.mem_get_info()[0]
        for folder in (first, second, first):
            give(engine, "/update_weights_from_disk", {"model_path": str(folder), "weight_version": "2"})
        assert_equal(seen(engine), before)
        assert abs(torch.cuda.mem_get_info()[0] - free) < 1 << 29, "an update keeps memory"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_from_a_group(folders: tuple[Path, Path]) -> None:
    """The trainer is on the second GPU."""
    first, second = folders
    with start(second) as fresh:
        expected = seen(fresh)
    with start(first) as engine, torch.cuda.device(1):
        seen(engine)
        group = trainer(engine, 2, "nccl")
        tensors = {name: tensor.cuda() for name, tensor in load_file(second / FILE).items()}
        with alongside(lambda: give(engine, "/update_weights_from_distributed", announced(tensors))):
            for tensor in tensors.values():
                groups.broadcast(group, tensor)
        assert_equal(seen(engine), expected)
