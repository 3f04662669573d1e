"""Checkpoints that differ from the published Instruct ones in names or missing tensors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config.huggingface import read_config
from models.scaffold import SHAPES, write_model_folder
from tests.unit.models.harness import PagedRunner, Prompt, Qwen3VL, load
from tests.unit.models.text_checkpoints import write

IDS = list(range(5, 300, 13))


def change(folder: Path, rename: Callable[[str], str | None]) -> None:
    file = folder / "model.safetensors"
    tensors = {new: tensor for name, tensor in load_file(file).items() if (new := rename(name)) is not None}
    save_file(tensors, file, metadata={"format": "pt"})


def settings(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@torch.inference_mode()
def hidden(model: Qwen3VL) -> torch.Tensor:
    runner = PagedRunner(model)
    batch = runner.batch([(runner.start(Prompt(IDS, [], [])), len(IDS))], num_prefill_rows=1, want="all")
    runner.attention.plan(batch.attention)
    return model(batch, runner.attention)


def test_an_embedding_checkpoint_without_output_matrix_loads(tmp_path: Path) -> None:
    """Qwen3-VL-Embedding-8B has no `lm_head` although its configuration does not tie it. Red if it is refused."""
    write_model_folder(tmp_path, SHAPES["tiny"], weights="random", seed=1)
    expected = hidden(load(tmp_path))
    for prefix in ("model.", ""):
        change(tmp_path, lambda name, prefix=prefix: None if name == "lm_head.weight" else prefix + name.removeprefix("model."))
        model = load(tmp_path)
        assert hidden(model).equal(expected)
        assert model.lm_head.weight is model.language_model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["qwen3", "llama3, tied"])
def test_a_text_checkpoint_without_prefix_loads(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    expected = hidden(load(tmp_path))
    change(tmp_path, lambda name: name.removeprefix("model."))
    assert hidden(load(tmp_path)).equal(expected)
    change(tmp_path, lambda name: None if name == "lm_head.weight" else name)
    assert hidden(load(tmp_path)).equal(expected)


def test_text_config_alone_may_tie_the_embeddings(tmp_path: Path) -> None:
    write_model_folder(tmp_path, replace(SHAPES["tiny"], tied=True), weights="none", seed=0)
    for of_model, of_text, expected in ((None, True, True), (None, None, False), (True, False, True), (False, True, False)):
        text = json.loads((tmp_path / "config.json").read_text())["text_config"] | {"tie_word_embeddings": of_text}
        settings(tmp_path, tie_word_embeddings=of_model, text_config=text)
        assert read_config(tmp_path).tie_word_embeddings is expected
