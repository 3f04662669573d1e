"""Loading: every tensor exactly once, each rank its slice."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.checkpoint.load import fill, load_weights
from models.config.huggingface import read_config
from models.decoders.qwen3_vl import Qwen3VL
from models.parallel.group import TensorParallel, kv_heads_of
from models.scaffold import SHAPES, write_model_folder
from models.scaffold.weights import write_random_weights
from tests.unit.models.harness import TensorSource, assert_same, load, make


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


def empty_model(folder: Path) -> Qwen3VL:
    return make(read_config(folder), TensorParallel.single())


def test_shards_equal_one_file(tiny: Qwen3VL, tiny_folder: Path, tmp_path: Path) -> None:
    write_model_folder(tmp_path, SHAPES["tiny"], weights="none", seed=0)
    write_random_weights(tmp_path, seed=1, max_shard_bytes=1 << 20)
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    assert_same(tiny, load(tmp_path))


@pytest.mark.parametrize("tied", [False, True])
def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path, tied: bool) -> None:
    write_model_folder(tmp_path, replace(SHAPES["tiny"], tied=tied), weights="random", seed=1)
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) is not tied
    model = empty_model(tmp_path)
    fill(model, TensorSource(tensors), silent)
    name = "model.language_model.layers.2.mlp.up_proj.weight"
    for change, message in (
        ({name: None}, f"misses tensor {name}"),
        ({"model.visual.surprise": torch.zeros(1)}, "has unexpected tensor model.visual.surprise"),
        ({name: tensors[name][:, :-1]}, f"tensor {name} has shape"),
    ):
        changed = {key: value for key, value in (tensors | change).items() if value is not None}
        with pytest.raises(ValueError, match=message):
            fill(model, TensorSource(changed), silent)


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path: Path) -> None:
    write_model_folder(tmp_path, replace(SHAPES["tiny"], tied=True), weights="random", seed=1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    model = empty_model(tmp_path)
    fill(model, TensorSource(tensors), silent)
    assert model.lm_head.weight.equal(tensors["lm_head.weight"])


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    write_model_folder(tmp_path, SHAPES["tiny"], weights="none", seed=0)
    with pytest.raises(ValueError, match="no safetensors"):
        load_weights(empty_model(tmp_path), tmp_path, silent)


def test_kv_heads_are_split_or_replicated() -> None:
    assert [kv_heads_of(8, TensorParallel(rank, 4, None)) for rank in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [kv_heads_of(2, TensorParallel(rank, 4, None)) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    with pytest.raises(ValueError, match="num_key_value_heads"):
        kv_heads_of(3, TensorParallel(0, 2, None))
    with pytest.raises(ValueError, match="num_key_value_heads"):
        kv_heads_of(2, TensorParallel(0, 3, None))
