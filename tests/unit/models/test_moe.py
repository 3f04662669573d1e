"""Mixtures of experts against transformers with the same weights: layouts of checkpoints, ranks, float8. Float32 on the CPU."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3VLMoeForConditionalGeneration

from models.checkpoint.load import fill
from models.config.formats import PLAIN, MatrixFormat
from models.config.huggingface import read_config
from models.decoders.qwen3_vl import Qwen3VL
from models.layers.linear import Setup
from models.layers.moe import SparseMoe
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder
from models.scaffold.shapes import Experts as ExpertsShape
from tests.unit.models import reference
from tests.unit.models.harness import (
    ONE_IMAGE,
    PROMPTS,
    TORCH,
    Prompt,
    TensorSource,
    assert_same,
    every_logit,
    load,
    make,
    relative,
    stored_tensors,
)  # fmt: skip

TINY = SHAPES["tiny-moe"]
VARIANTS = {
    "tiny": TINY,
    "many": replace(TINY, experts=ExpertsShape(60, 4, 32)),
    "wide": replace(TINY, hidden=256, experts=ExpertsShape(4, 3, 192)),
}
EXPERTS = "mlp.experts."
FLOAT8 = MatrixFormat("float8", "float8")
Tensors = dict[str, torch.Tensor]


def empty(folder: Path, tp: TensorParallel | None = None) -> Qwen3VL:
    return make(read_config(folder), tp or TensorParallel.single())


def transformers_model(folder: Path) -> Qwen3VLMoeForConditionalGeneration:
    return Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("moe")
    write_model_folder(made, TINY, weights="random", seed=1)
    return made


@pytest.fixture(scope="module")
def float8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("moe-fp8")
    write_model_folder(made, TINY, weights="random", seed=1, format="float8")
    return made


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_token_equal_the_reference(tmp_path: Path, variant: str) -> None:
    write_model_folder(tmp_path, VARIANTS[variant], weights="random", seed=2)
    model, theirs = load(tmp_path), transformers_model(tmp_path)
    for parts in PROMPTS.values() if variant == "tiny" else (ONE_IMAGE,):
        prompt = Prompt.build(model.config, parts)
        expected = reference.logits(theirs, model.config, prompt)
        for chunk in (1 << 30, 64, 7):
            assert relative(every_logit(model, prompt, chunk), expected) < 1e-4, f"chunks of {chunk}"


def resaved(tensors: Tensors) -> Tensors:
    return {name: tensor.transpose(1, 2).contiguous() if EXPERTS in name else tensor for name, tensor in tensors.items()}


def single(tensors: Tensors) -> Tensors:
    made = {name: tensor for name, tensor in tensors.items() if EXPERTS not in name}
    for name, tensor in resaved(tensors).items():
        if EXPERTS in name:
            prefix, _, kind = name.partition(EXPERTS)
            suffix = "_scale_inv" if kind.endswith("_scale_inv") else ""
            for expert, matrix in enumerate(tensor):
                parts = {"gate": matrix.chunk(2)[0], "up": matrix.chunk(2)[1]} if kind.startswith("gate_up") else {"down": matrix}
                made |= {f"{prefix}{EXPERTS}{expert}.{part}_proj.weight{suffix}": m.contiguous() for part, m in parts.items()}
    return made


RANKS = [
    TensorParallel.single(),
    *(TensorParallel(rank, 2, None, whole_experts=whole) for rank in range(2) for whole in (False, True)),
]


@pytest.mark.parametrize("layout", [resaved, single])
def test_every_layout_gives_the_same(folder: Path, float8_folder: Path, layout: Callable[[Tensors], Tensors]) -> None:
    for source, tp in itertools.product((folder, float8_folder), RANKS):
        published, other, tensors = empty(source, tp), empty(source, tp), load_file(source / "model.safetensors")
        for model, stored in ((published, tensors), (other, layout(tensors))):
            for values in stored_tensors(model).values():
                values.fill_(torch.nan if values.is_floating_point() else 255)
            fill(model, TensorSource(stored), lambda done, total: None)
        assert_same(published, other)
        assert all(not values.is_floating_point() or values.isfinite().all() for values in stored_tensors(published).values())


def test_what_transformers_saves_gives_the_same(folder: Path, tmp_path: Path) -> None:
    ours, theirs = load(folder), transformers_model(folder)
    theirs.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert_same(ours, again)
    own = empty(tmp_path / "saved")
    fill(own, TensorSource({name: tensor.data for name, tensor in theirs.named_parameters()}), lambda done, total: None)
    assert_same(ours, own)


FIRST = "model.language_model.layers.0.mlp.experts."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {name: x for name, x in t.items() if name != f"{FIRST}down_proj"}, f"misses tensor {FIRST}down_proj"),
        (lambda t: {name: x for name, x in single(t).items() if name != f"{FIRST}5.up_proj.weight"}, rf"misses tensor {FIRST}5\.up_proj"),
        (lambda t: t | single(t), rf"tensor {FIRST}gate_up_proj can be read in more than one way"),
        (lambda t: t | {f"{FIRST}down_proj": resaved(t)[f"{FIRST}down_proj"]}, rf"tensor {FIRST}(down|gate_up)_proj has shape"),
        (lambda t: t | {f"{FIRST}down_proj": t[f"{FIRST}down_proj"][:-1]}, rf"tensor {FIRST}down_proj has shape"),
        (lambda t: t | {f"{FIRST}9.up_proj.weight": torch.zeros(1)}, rf"has unexpected tensor {FIRST}9\.up_proj"),
    ],
)
def test_what_fits_no_layout_or_two_is_refused(folder: Path, change: Callable[[Tensors], Tensors], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill(empty(folder), TensorSource(change(load_file(folder / "model.safetensors"))), lambda done, total: None)


def test_what_does_not_divide_is_a_value_error(folder: Path, float8_folder: Path) -> None:
    text = read_config(folder).text
    assert text.moe is not None
    for tp, is_fp8, message in (
        (TensorParallel(0, 3, None), False, r"moe_intermediate_size \(256\) is not divisible by 3"),
        (TensorParallel(0, 3, None, whole_experts=True), False, r"num_experts \(8\) is not divisible by 3"),
        (TensorParallel(0, 4, None), True, "64 x 128"),
    ):
        with pytest.raises(ValueError, match=message):
            SparseMoe(text.hidden_size, text.moe, FLOAT8 if is_fp8 else PLAIN, Setup.on(TORCH, tp, torch.float32))
