"""Low-bit checkpoints, written by compressed-tensors and by formulas of AutoAWQ and AutoGPTQ: logits are those of the values."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.checkpoint.load import load_weights
from models.config.huggingface import read_config
from models.kernels.stream import RowClass
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder
from models.weights.matrix import matrices_of
from tests.unit.models.harness import ONE_IMAGE, Prompt, every_logit, load, make
from tests.unit.models.quantized_checkpoints import IGNORED, Writer, awq, compressed, gptq, modelopt_fp4, modelopt_fp8, rewrite

GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": False, "sym": True}


def by_compressed(format: str, **weights: Any) -> tuple[Writer, dict[str, object]]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": IGNORED}
    return compressed(**weights), config


def integers(bits: int, symmetric: bool, group: int = 0) -> tuple[Writer, dict[str, object]]:
    size = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return by_compressed("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **size)


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
CASES: dict[str, tuple[Writer, dict[str, object]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "modules_to_not_convert": None}),
    "gptq": (gptq(4, 1), GPTQ | {"bits": 4}),
    "gptq, asymmetric": (gptq(4, 1, symmetric=False), GPTQ | {"bits": 4, "sym": False}),
    "gptq_v2 of 8 bits": (gptq(8, 0), GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}),
    "w4a16 of 32": integers(4, True, 32),
    "w4a16 of 128, asymmetric": integers(4, False, 128),
    "w4a16 by channel": integers(4, True),
    "w8a16 of 64": integers(8, True, 64),
    "w8a16, asymmetric, by channel": integers(8, False),
    "float8 by channel": by_compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
    "float8 by matrix": by_compressed("float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True),
    "nvfp4": by_compressed("nvfp4-pack-quantized", **NVFP4),
    "modelopt_fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "model.visual*"]}),
    "modelopt_fp4": (modelopt_fp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*visual*", "*mlp.gate"]}),
}


def is_quantized(module: str) -> bool:
    return ".layers." in module and not module.endswith(("mlp.gate", "shared_expert_gate", "in_proj_a", "in_proj_b"))


def folders(tmp_path: Path, shape: str, case: str, with_gates: bool = False) -> tuple[Path, Path]:
    plain, out, meant = tmp_path / "plain", tmp_path / "out", tmp_path / "meant"
    write_model_folder(plain, SHAPES[shape], weights="random", seed=1)
    writer, config = CASES[case]
    if with_gates:
        config = config | {"ignore": [name for name in IGNORED if "in_proj" not in name]}
    rewrite(plain, out, meant, writer, config, lambda module: is_quantized(module) or (with_gates and module[:-1].endswith("in_proj_")))
    return out, meant


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_values(case: str, tmp_path: Path) -> None:
    out, meant = folders(tmp_path, "tiny", case)
    ours, theirs = load(out), load(meant)
    prompt = Prompt.build(ours.config, ONE_IMAGE)
    assert (every_logit(ours, prompt) - every_logit(theirs, prompt)).abs().max() < 1e-4
    assert {matrix.storage.scheme.layout for _, matrix in matrices_of(ours)} == {"final"}


WITH_GATES = ("w4a16 of 32",)  # the projections of Gated DeltaNet's gates are quantized, too


@pytest.mark.parametrize("case", ["awq", "gptq", "w4a16 of 32", "nvfp4"])
@pytest.mark.parametrize("shape", ["tiny-moe", "3.5-tiny", "3.5-tiny-moe"])
def test_experts_and_other_mixers(shape: str, case: str, tmp_path: Path) -> None:
    out, meant = folders(tmp_path, shape, case, with_gates=case in WITH_GATES)
    ours, theirs = (load(folder, with_head=shape.startswith("3.5")) for folder in (out, meant))
    for (name, matrix), (_, expected) in zip(matrices_of(ours), matrices_of(theirs), strict=True):
        x = torch.eye(matrix.shape[1])
        assert matrix.product(x, RowClass.MANY).allclose(expected.product(x, RowClass.MANY), atol=1e-5), name
    prompt = Prompt.build(ours.config, ONE_IMAGE)
    assert (every_logit(ours, prompt) - every_logit(theirs, prompt)).abs().max() < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_parts_of_the_same_values(case: str, tmp_path: Path) -> None:
    out, _ = folders(tmp_path, "tiny", case)
    whole = dict(matrices_of(load(out)))
    parts = []
    for rank in range(2):
        part = make(read_config(out), TensorParallel(rank, 2, None))
        load_weights(part, out, lambda done, total: None)
        part.finish()
        parts.append(dict(matrices_of(part)))
    for name, matrix in whole.items():
        values = [part[name].storage.dequantized() for part in parts]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.cat(values, 1).equal(matrix.storage.dequantized()), name
        else:
            assert sorted(torch.cat(values).flatten().tolist()) == sorted(matrix.storage.dequantized().flatten().tolist()), name


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "order": (GPTQ | {"bits": 4, "desc_act": True}, "desc_act must be False, got True"),
    "bits": (GPTQ | {"bits": 3}, "4 or 8 bits"),
    "gemv": ({"quant_method": "awq", "version": "gemv"}, "version must be 'gemm'"),
    "method": ({"quant_method": "bitsandbytes"}, "got 'bitsandbytes'; supported are AWQ, GPTQ"),
    "scheme": (
        by_compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)[1],
        "has int-quantized with 8 bits of int by channel",
    ),
    "tower": (by_compressed("nvfp4-pack-quantized", **NVFP4)[1] | {"ignore": ["lm_head"]}, "must ignore visual"),
    "algorithm": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "must be FP8 or NVFP4, got 'W4A8_AWQ'"),
}


ODD = (0, -1, 1.5, "x", [1], {"x": 1}, ["("], {"(": {}})


def test_odd_values_are_refused_with_a_reason(tmp_path: Path) -> None:
    write_model_folder(tmp_path, SHAPES["3.5-tiny"], weights="none", seed=1)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    methods = [by_compressed("nvfp4-pack-quantized", **NVFP4)[1], GPTQ | {"bits": 4, "dynamic": {}}, CASES["modelopt_fp8"][1]]
    refused = 0
    for quantization in methods:
        whole = config | {"quantization_config": quantization}
        sections = [whole, whole["text_config"], whole["vision_config"], quantization]
        for section in sections:
            for name, before in list(section.items()):
                for odd in (*ODD, 10**30):
                    section[name] = odd
                    (tmp_path / "config.json").write_text(json.dumps(whole), encoding="utf-8")
                    try:
                        read_config(tmp_path)
                    except ValueError as problem:
                        refused += "\n" not in str(problem)
                section[name] = before
    assert refused > 100


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named_before_weights_are_read(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    write_model_folder(tmp_path, SHAPES["tiny"], weights="none", seed=1)
    read = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(read | {"quantization_config": config}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_modules_may_have_formats_of_their_own(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": weights},
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": weights | {"num_bits": 8}},
    }
    ignored = [*IGNORED, "re:.*layers.0.mlp.*"]
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": ignored}
    plain, out, meant = tmp_path / "plain", tmp_path / "out", tmp_path / "meant"
    write_model_folder(plain, SHAPES["tiny"], weights="random", seed=1)
    four, eight = compressed(**weights), compressed(**weights | {"num_bits": 8})
    rewrite(plain, tmp_path / "first", tmp_path / "eight", eight, config, lambda module: is_quantized(module) and "self_attn" in module)
    rewrite(tmp_path / "first", out, tmp_path / "unused", four, config, is_mlp)
    rewrite(tmp_path / "eight", tmp_path / "unread", meant, four, config, is_mlp)
    ours, theirs = load(out), load(meant)
    prompt = Prompt.build(ours.config, ONE_IMAGE)
    assert (every_logit(ours, prompt) - every_logit(theirs, prompt)).abs().max() < 1e-4


def is_mlp(module: str) -> bool:
    return is_quantized(module) and ".mlp." in module and "layers.0." not in module
