"""Checkpoints that differ from the published Instruct ones in names, missing tensors or several indexes, and dummy weights of ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint.load import init_dummy_weights
from models.config.huggingface import read_config
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder
from models.scaffold.shapes import Delta
from models.weights.matrix import matrices_of
from tests.unit.models.harness import PagedRunner, Prompt, Qwen3VL, load, make
from tests.unit.models.text_checkpoints import write

IDS = list(range(5, 300, 13))


def change(folder: Path, rename: Callable[[str], str | None]) -> None:
    """Renames the checkpoint's tensors by `rename(name)`; drops a tensor for which it returns None."""
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
    """Qwen3-Embedding names its tensors `layers.0...`, without `model.`."""
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


@pytest.mark.parametrize("format", ["plain", "float8"])
def test_dummy_weights_of_what_ranks_share_are_equal(tmp_path: Path, format: str) -> None:
    shape = replace(SHAPES["3.5-tiny"], intermediate=512, delta=Delta(4, 4, 128))
    write_model_folder(tmp_path, shape, weights="none", seed=0, format=format)
    config = read_config(tmp_path, with_head=True)
    models = [make(config, TensorParallel(rank, 4, None)) for rank in range(4)]
    for model in models:
        init_dummy_weights(model, seed=0)
    for name, matrix in matrices_of(models[0]):
        values = matrix.storage.values if matrix.format == "plain" else matrix.storage.dequantized()
        share = (2 * shape.layers) ** -0.5 if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
        assert float(values.std()) == pytest.approx(share * matrix.shape[1] ** -0.5, rel=0.05), name
    slots = [{(slot.name, str(slot.index)): slot.target for slot in model.checkpoint_tensors()} for model in models]
    keys = [next(target for (name, _), target in each.items() if name.endswith("layers.3.self_attn.k_proj.weight")) for each in slots]
    assert [keys[0].float().equal(other.float()) for other in keys] == [True, True, False, False]
    shared = slots[0].keys() & slots[1].keys()
    assert any(name == "mtp.fc.weight" for name, _ in shared)
    for key in shared:
        assert slots[0][key].float().equal(slots[1][key].float()), key
