"""FP8 checkpoints: our decoder against transformers' with the same weights, inputs of products rounded by a few lines of our own.

transformers multiplies float8 on GPUs only. Scales are as in its `FP8Linear`: one for 128 x 128 weights, one for 128 inputs of a token.
Ties may be rounded either way, by processor; then later tokens differ a little: the first are compared.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from models.config.formats import MatrixFormat
from models.layers.linear import FusedColumnParallelLinear, Part, Setup
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder
from models.weights.float8 import BlockScaled
from models.weights.matrix import matrices_of
from tests.unit.models import reference
from tests.unit.models.harness import ONE_IMAGE, TEXT, TORCH, PagedRunner, Prompt, assert_same, every_logit, load
from tests.unit.models.test_moe import EXPERTS

PLAIN_GATES = ("in_proj_a", "in_proj_b", "shared_expert_gate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fp8")
    write_model_folder(made, SHAPES["tiny"], weights="random", seed=1, format="float8")
    return made


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).quantile(0.1))


def rounded(x: torch.Tensor) -> torch.Tensor:
    groups = x.reshape(-1, 128)
    scale = groups.abs().max(dim=1, keepdim=True).values / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).view_as(x)


def rounding_experts(experts: nn.Module, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor], _: object) -> torch.Tensor:
    hidden, chosen, weights = args
    out = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up = F.linear(rounded(hidden[token]), experts.get_parameter("gate_up_proj")[expert]).chunk(2)
            out[token] += weight * F.linear(rounded(F.silu(gate) * up), experts.get_parameter("down_proj")[expert])
    return out


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "3.5-tiny", "3.5-tiny-moe"])
def test_logits_equal_those_of_rounded_products(name: str, tmp_path: Path) -> None:
    for format in ("plain", "float8"):
        write_model_folder(tmp_path / format, SHAPES[name], weights="random", seed=1, format=format)
    ours, tensors = load(tmp_path / "float8"), load_file(tmp_path / "float8" / "model.safetensors")
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    for tensor in [name for name in tensors if f"{name}_scale_inv" in tensors and not name.startswith("mtp.")]:
        scales, target = tensors[f"{tensor}_scale_inv"].repeat_interleave(128, -1).repeat_interleave(128, -2), theirs.get_parameter(tensor)
        matrix = tensors[tensor].float() * scales
        target.data.copy_(matrix.mT if EXPERTS in tensor and not name.startswith("3.5") else matrix)
    prompt = Prompt.build(ours.config, ONE_IMAGE)
    unrounded = reference.logits(theirs, ours.config, prompt)
    for path, module in theirs.model.language_model.layers.named_modules():
        if isinstance(module, nn.Linear) and not path.endswith(PLAIN_GATES):
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))
        elif path.endswith(".experts"):
            module.register_forward_hook(rounding_experts)
    expected, found = reference.logits(theirs, ours.config, prompt), every_logit(ours, prompt)
    assert difference(found, expected) < 1e-4
    assert difference(found, unrounded) > 2e-2
    assert difference(every_logit(ours, prompt, 37), found) < 1e-4


@pytest.mark.parametrize("name", ["tiny", "3.5-tiny-moe"])
def test_rounding_at_the_start_is_what_such_a_checkpoint_holds(name: str, tmp_path: Path) -> None:
    for format in ("plain", "float8"):
        write_model_folder(tmp_path / format, SHAPES[name], weights="random", seed=1, format=format)
    rounded, read = load(tmp_path / "plain", quantized_to="float8"), load(tmp_path / "float8")
    for layer in (*rounded.language_model.layers, *read.language_model.layers) if name == "3.5-tiny-moe" else ():
        layer.mlp.gate.weight[-15:] = 0  # after the shared expert's row they hold anything
    assert_same(rounded, read)
    assert [matrix.format for _, matrix in matrices_of(rounded)].count("float8") == 4 * 4


@pytest.mark.parametrize(("rows", "columns"), [((192,), 128), ((128,), 192), ((64, 64), 128), ((192, 64), 128)])
def test_blocks_are_whole(rows: tuple[int, ...], columns: int) -> None:
    parts = [Part(f"part_{i}", count, 0, count) for i, count in enumerate(rows)]
    setup = Setup.on(TORCH, TensorParallel.single(), torch.float32)
    with pytest.raises(ValueError, match=f"{min(rows)} x {columns}"):
        FusedColumnParallelLinear(columns, parts, MatrixFormat("plain", "float8"), setup)


def with_plain(folder: Path, out: Path, modules: tuple[str, ...], key: str = "modules_to_not_convert") -> Path:
    out.mkdir()
    for file in folder.glob("*.json"):
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["modules_to_not_convert"]
    config["quantization_config"][key] = ["lm_head", *modules]
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_scale_inv") and any(f"{module}." in name for module in modules)]:
        scales, values = tensors.pop(name), tensors.pop(name.removesuffix("_scale_inv"))
        tensors[name.removesuffix("_scale_inv")] = BlockScaled(values, scales).dequantized()
    save_file(tensors, out / "model.safetensors")
    return out


@torch.inference_mode()
def test_modules_that_a_checkpoint_leaves_out_are_plain(folder: Path, tmp_path: Path) -> None:
    first = "model.language_model.layers.0"
    ours = load(with_plain(folder, tmp_path / "some", (first, "layers.1.self_attn.o_proj", "layers.2.mlp")))
    layers = [(layer.self_attn, layer.mlp) for layer in ours.language_model._layers]
    matrices = [(attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj) for attn, mlp in layers]
    formats = [[matrix.weight.format == "float8" for matrix in of_layer] for of_layer in matrices]
    assert formats == [[False] * 4, [True, False, True, True], [True, True, False, False], [True] * 4]
    expected, prompt = load(folder), Prompt.build(ours.config, TEXT)
    logits = [PagedRunner(model).prefill(PagedRunner(model).start(prompt), 1 << 30) for model in (ours, expected)]
    assert 0 < float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.1
    whole = load(with_plain(folder, tmp_path / "all", ("model.language_model",), "ignored_layers"))
    assert {matrix.format for _, matrix in matrices_of(whole)} == {"plain"}


def test_parts_of_a_matrix_have_one_format(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gate_proj, up_proj, down_proj of .*layers\.3\.mlp the same format, got .*down_proj: plain"):
        load(with_plain(folder, tmp_path / "odd", ("layers.3.mlp.down_proj",)))
