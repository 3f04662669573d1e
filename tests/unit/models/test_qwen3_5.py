"""Qwen3.5 against transformers with the same weights, float32 on the CPU: whole, in chunks, from states of other rows, with pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.config.huggingface import read_config
from models.decoders.qwen3_vl import Qwen3VL
from tests.unit.models import reference
from tests.unit.models.harness import (
    ONE_IMAGE,
    SEVERAL_TURNS,
    VIDEOS,
    Prompt,
    check_a_step_without_wanted_tokens,
    check_rows_of_one_step,
    every_logit,
    load,
    relative,
)  # fmt: skip
from tests.unit.models.qwen3_5_checkpoints import add_head, write

PROMPTS = {"text": [list(range(5, 2500, 13))], "one image": ONE_IMAGE, "several turns": SEVERAL_TURNS, "videos": VIDEOS}
KINDS = ("dense", "sparse")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Qwen3VL, Any]]:
    made = {}
    for kind in KINDS:
        folder: Path = tmp_path_factory.mktemp(kind)
        theirs = write(folder, is_sparse=kind == "sparse", is_tied=kind == "dense")
        made[kind] = load(folder), theirs
    return made


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_reference_whole_and_in_chunks(both: dict[str, tuple[Qwen3VL, Any]], kind: str, name: str) -> None:
    ours, theirs = both[kind]
    prompt = Prompt.build(ours.config, PROMPTS[name])
    expected = reference.logits(theirs, ours.config, prompt)
    for chunk in (1 << 30, 64, 7):
        assert relative(every_logit(ours, prompt, chunk), expected) < 1e-4, f"chunks of {chunk}"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_step_do_not_see_each_other(both: dict[str, tuple[Qwen3VL, Any]], kind: str) -> None:
    check_rows_of_one_step(both[kind][0])


def test_a_step_without_wanted_tokens_keeps_the_last_layers_state(both: dict[str, tuple[Qwen3VL, Any]]) -> None:
    check_a_step_without_wanted_tokens(both["dense"][0])


def test_intern_s2_is_the_mixture_without_its_time_series(tmp_path: Path) -> None:
    add_head(tmp_path, write(tmp_path, is_sparse=True))
    mixture = load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "intern_s2_preview", "ts_config": {}}))
    series = ["model.time_series.encoder.weight", "time_series.x", "time_series_forecaster.head.weight"]
    save_file({name: torch.ones(2) for name in series}, tmp_path / "model-series.safetensors")
    prompt = Prompt.build(mixture.config, PROMPTS["text"])
    assert torch.equal(every_logit(load(tmp_path), prompt), every_logit(mixture, prompt))
    names = read_config(tmp_path, with_head=True).architecture.names_of(["mtp.fc.weight", *series])
    assert names == {"mtp.fc.weight": "mtp.fc.weight"}


def test_what_the_configuration_says(both: dict[str, tuple[Qwen3VL, Any]], tmp_path: Path) -> None:
    assert both["dense"][0].config.eos_token_ids == (4002, 4001)
    for name, value in (("attn_output_gate", False), ("mamba_ssm_dtype", "bfloat16")):
        write(tmp_path, **{name: value})
        with pytest.raises(ValueError, match=name):
            read_config(tmp_path)
