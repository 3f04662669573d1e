"""One tiny checkpoint for the tests of models, loaded by us and by transformers."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from models.decoders.qwen3_vl import Qwen3VL
from models.scaffold import SHAPES, write_model_folder
from tests.unit.models.harness import load


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model_folder(folder, SHAPES["tiny"], weights="random", seed=1)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Qwen3VL:
    return load(tiny_folder)


@pytest.fixture(scope="session")
def reference_model(tiny_folder: Path) -> Qwen3VLForConditionalGeneration:
    return Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder, dtype=torch.float32).eval()
