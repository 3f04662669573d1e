"""Launching a step never waits for the device: attention and hybrids, images, sampling of every kind, drafts, adapters, blocks that were
snapshots."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config.huggingface import read_config
from models.scaffold import SHAPES, write_model_folder
from models.scaffold.adapters import write_adapter
from tests.e2e.serving import Engine, doomed, image_part, picture, text_part
from tests.gpu.asynchronous import PREFIX

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

SMALL: dict[str, Any] = {"layers": 8, "vocab_size": 4096, "num_base_tokens": 4000, "vision_depth": 6}
FLAGS = ("--load-format", "dummy", "--max-model-len", "2048")
ROUNDS, CLIENTS = 4, 8
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 1},
    {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"7": 3}},
    {"logprobs": True, "top_logprobs": 3},
    {"n": 2, "temperature": 1.0},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"prompt_logprobs": 1},
    {"bad_words": ["a"], "min_tokens": 4},
]


def ask_all(engine: Engine, **fields: Any) -> None:
    def ask(i: int) -> None:
        images = [image_part(picture(100 * i + j, 320, 448), "JPEG") for j in range(i % 5)]
        content = [*images, text_part(f"{i} " + "word " * (50 * (i % 7)))]
        response = engine.chat(content, max_tokens=24, ignore_eos=i % 2 == 0, **FIELDS[i % len(FIELDS)], **fields)
        assert response.status_code == 200, response.text

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, range(ROUNDS * len(FIELDS))))


@pytest.mark.parametrize("flags", [(), ("--draft", "mtp"), ("--draft", "lookup")])
def test_hybrids(tmp_path: Path, flags: tuple[str, ...]) -> None:
    write_model_folder(tmp_path, replace(SHAPES["3.5-9B"], **SMALL), weights="none", seed=0)
    with doomed(tmp_path, *FLAGS, *flags, prefix=PREFIX) as engine:
        ask_all(engine)


def test_adapters(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "base", replace(SHAPES["8B"], **SMALL | {"layers": 4}, deepstack=(1, 3, 5)), weights="none", seed=0)
    config = read_config(tmp_path / "base")
    modules = [f"{name}={write_adapter(tmp_path / name, config, seed=i)}" for i, name in enumerate("ab")]
    with doomed(tmp_path / "base", *FLAGS, "--max-loras", "1", "--lora-modules", *modules, prefix=PREFIX) as engine:
        for name in (None, "a", "b", "a"):
            ask_all(engine, **({} if name is None else {"model": name}))
