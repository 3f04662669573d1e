"""Weights replaced in place: logits are those of a fresh load, addresses stay, and a refused update has written nothing."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint.load import load_weights, opened
from models.checkpoint.update import InMemory, WeightUpdate
from models.config.huggingface import read_config
from models.decoders.contract import make_model
from models.decoders.qwen3_vl import Qwen3VL
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, Shape, write_model_folder
from models.weights.matrix import matrices_of
from tests.unit.models import adapters
from tests.unit.models.harness import ONE_IMAGE, TORCH, Prompt, TensorSource, assert_same, every_logit, load, stored_tensors
from tests.unit.models.test_lora import AdaptedRunner, adapt
from tests.unit.models.test_lora import every_logit as adapted_logits
from tests.unit.models.test_low_bit import folders

FILE = "model.safetensors"
TIED = replace(SHAPES["tiny"], tied=True)


def update(model: Qwen3VL, folder: Path) -> None:
    with opened(folder, model.config.architecture) as tensors:
        job = WeightUpdate(model, tensors, is_whole=True)
        for name in job.names:
            job.write(name, tensors[name])
        job.finish()


def altered(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor rolled by a row; what is no code is a quarter larger, so that scales differ too."""
    if tensor.itemsize == 1:
        return tensor.view(torch.uint8).roll(1, 0).view(tensor.dtype)
    return (tensor.roll(1, 0) if tensor.ndim else tensor) * (1.25 if tensor.is_floating_point() else 1)


def alter(folder: Path, out: Path) -> Path:
    """Copy a checkpoint with other weights."""
    shutil.copytree(folder, out)
    save_file({name: altered(tensor) for name, tensor in load_file(folder / FILE).items()}, out / FILE)
    return out


def written(shape: Shape, format: str = "plain") -> Callable[[Path], Path]:
    def write(tmp_path: Path) -> Path:
        write_model_folder(tmp_path / "1", shape, weights="random", seed=1, format=format)
        return tmp_path / "1"

    return write


def of_few_bits(case: str, shape: str = "tiny") -> Callable[[Path], Path]:
    return lambda tmp_path: folders(tmp_path, shape, case)[0]


UPDATES: dict[str, tuple[Callable[[Path], Path], str | None]] = {
    "untied": (written(SHAPES["tiny"]), None),
    "tied": (written(TIED), None),
    "experts": (written(SHAPES["tiny-moe"]), None),
    "rounded to float8": (written(SHAPES["tiny"]), "float8"),
    "experts rounded to float8": (written(SHAPES["tiny-moe"]), "float8"),
    "stored in float8": (written(SHAPES["tiny"], "float8"), None),
    "hybrid with its head": (written(SHAPES["3.5-tiny"]), None),
    "AWQ": (of_few_bits("awq"), None),
    "experts of 4 bits": (of_few_bits("w4a16 of 32", "tiny-moe"), None),
    "NVFP4": (of_few_bits("nvfp4"), None),
}


def derived(model: Qwen3VL) -> dict[str, torch.Tensor]:
    """All weights, and what the tower and the head compute from them."""
    tower = model.visual
    found = {**stored_tensors(model), "frame": tower.patch_embed._frame_weight, "offsets": tower._offsets}
    found |= {str(grid): tables.position_PD for grid, tables in tower._tables._tables.items()}
    if model.predictor is not None and model.predictor._rounded is not None:
        found["rounded"] = model.predictor._rounded.matrix.values.view(torch.uint8)
    return found


@pytest.mark.parametrize("name", UPDATES)
@torch.inference_mode()
def test_logits_are_those_of_a_fresh_start(name: str, tmp_path: Path) -> None:
    """From the new weights, at the old addresses; and the first weights give the first logits again."""
    write, rounded_to = UPDATES[name]
    second = alter(first := write(tmp_path), tmp_path / "altered")
    model, fresh = (load(folder, with_head="head" in name, quantized_to=rounded_to) for folder in (first, second))
    for one in (model, fresh):
        if one.predictor is not None:
            one.predictor.round_output_matrix()
    prompt = Prompt.build(model.config, ONE_IMAGE)
    before, expected = every_logit(model, prompt), every_logit(fresh, prompt)
    assert not before.equal(expected)
    addresses = {path: tensor.data_ptr() for path, tensor in derived(model).items()}
    update(model, second)
    assert every_logit(model, prompt).equal(expected)
    assert {path: tensor.data_ptr() for path, tensor in derived(model).items()} == addresses
    theirs = derived(fresh)
    assert not [path for path, tensor in derived(model).items() if not tensor.equal(theirs[path])]
    update(model, first)
    assert every_logit(model, prompt).equal(before)


@pytest.mark.parametrize("name", ["untied", "experts rounded to float8", "stored in float8", "hybrid with its head", "AWQ"])
@torch.inference_mode()
def test_each_rank_writes_its_part(name: str, tmp_path: Path) -> None:
    """In bfloat16, the dtype on GPUs."""
    write, rounded_to = UPDATES[name]
    second = alter(first := write(tmp_path), tmp_path / "altered")
    config = read_config(first, with_head="head" in name)
    config = replace(config, text=replace(config.text, quantized_to=rounded_to))
    for tp in (TensorParallel(rank, 2, None, whole_experts="rounded" in name) for rank in range(2)):
        model, fresh = (make_model(config, tp, TORCH, torch.bfloat16) for _ in range(2))
        for one, folder in ((model, first), (fresh, second)):
            load_weights(one, folder, lambda done, total: None)
            one.finish()
        update(model, second)
        assert_same(model, fresh)


@torch.inference_mode()
def test_adapters_stay(tiny_folder: Path, tmp_path: Path) -> None:
    """Adapted layers of decoder and tower get new weights, with and without an adapter."""
    adapter, second = adapters.write(tmp_path / "adapter", tiny_folder, 1), alter(tiny_folder, tmp_path / "altered")
    model, slots = adapt(tiny_folder, adapter)
    prompt = Prompt.build(model.config, ONE_IMAGE)
    before = adapted_logits(AdaptedRunner(model, slots), 0, prompt)
    update(model, second)
    fresh, theirs = adapt(second, adapter)
    for slot in (0, -1):
        found = adapted_logits(AdaptedRunner(model, slots), slot, prompt)
        assert found.equal(adapted_logits(AdaptedRunner(fresh, theirs), slot, prompt)) and not found.equal(before)


NAME = "model.language_model.layers.2.mlp.up_proj.weight"
GATE = "model.language_model.layers.2.mlp.gate_proj.weight"


def test_what_differs_is_refused_before_anything_is_written(tiny_folder: Path, tmp_path: Path) -> None:
    model, rounded = load(tiny_folder), load(tiny_folder, quantized_to="float8")
    tensors = load_file(tiny_folder / FILE)
    cases: list[tuple[Qwen3VL, dict[str, torch.Tensor], str]] = [
        (model, {name: tensor for name, tensor in tensors.items() if name != NAME}, f"misses tensor {NAME}"),
        (model, tensors | {"model.visual.surprise": torch.zeros(1)}, "unexpected tensor model.visual.surprise"),
        (model, tensors | {NAME: tensors[NAME][:, :-1]}, f"{NAME} has shape"),
        (model, tensors | {NAME: tensors[NAME].to(torch.float8_e4m3fn)}, f"{NAME} has dtype F8_E4M3, the model requires float32"),
        (model, tensors | {NAME + "_scale_inv": torch.zeros(1)}, "unexpected tensor"),
        (rounded, {NAME: tensors[NAME]}, f"has {NAME}, of a quantized layer, but misses tensor {GATE}"),
    ]
    for target, changed, message in cases:
        is_whole = len(changed) > 1
        before = {path: tensor.clone() for path, tensor in stored_tensors(target).items()}
        with pytest.raises(ValueError, match=message):
            WeightUpdate(target, TensorSource(changed), is_whole)
        after = stored_tensors(target)
        assert before.keys() == after.keys() and not [path for path in before if not before[path].equal(after[path])]
        assert {matrix.format for _, matrix in matrices_of(target)} == {"float8" if target is rounded else "plain"}


@torch.inference_mode()
def test_some_tensors_in_another_order(tiny_folder: Path, tmp_path: Path) -> None:
    """The tensors of a converted layer may come interleaved with those of others."""
    folder = alter(tiny_folder, tmp_path / "altered")
    tensors = load_file(folder / FILE)
    names = [name for name in sorted(tensors, reverse=True) if "mlp" in name and "layers" in name]
    model, expected = load(tiny_folder, quantized_to="float8"), load(folder, quantized_to="float8")
    job = WeightUpdate(model, TensorSource({name: tensors[name] for name in names}), is_whole=False)
    for name in names:
        job.write(name, InMemory(tensors[name]))
    job.finish()
    ours, theirs = stored_tensors(model), stored_tensors(expected)
    are_new = {path: ours[path].equal(theirs[path]) for path in ours}
    assert {path for path in are_new if are_new[path]} == {path for path in are_new if "language_model" in path and ".mlp." in path}
