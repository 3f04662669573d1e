"""One tiny checkpoint for the tests of models, loaded by us and by transformers."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from models.config import ModelConfig
from models.layers.parallel import TensorParallel
from models.qwen3_vl import Qwen3VL
from models.scaffold import SHAPES, write_model_folder
from models.weights import load_weights

CPU = torch.device("cpu")


def load(folder: Path) -> Qwen3VL:
    model = Qwen3VL(ModelConfig.from_folder(folder), TensorParallel.single(), torch.float32, CPU)
    load_weights(model, folder, lambda done, total: None)
    return model


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
