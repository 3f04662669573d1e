"""Qwen3.5 against transformers with the same weights, float32 on the CPU: whole, in chunks, from states of other rows, with pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.config.huggingface import read_config
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.reference.delta import chunked, recurrent
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


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 129, 300])
@pytest.mark.parametrize("is_equal", [True, False])
def test_chunked_equals_recurrent(length: int, is_equal: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(3, length, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    if is_equal:
        k[:] = k[:, :1]
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    decay = -0.3 * torch.rand(3, length, generator=generator, dtype=torch.float64) * (not is_equal)
    beta = 1 - torch.rand(3, length, generator=generator, dtype=torch.float64) * (not is_equal)
    arguments = [x.float() for x in (q, k, v, decay, beta, torch.randn(3, 16, 16, generator=generator))]
    for ours, theirs in zip(chunked(*arguments), recurrent(*arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


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
    dense, sparse = both["dense"][0].config, both["sparse"][0].config
    assert dense.eos_token_ids == (4002, 4001) and dense.num_visual_levels == 1
    assert dense.text.rotary_dim == 12 and [dense.text.ordinal(i) for i in range(6)] == [0, 0, 1, 2, 1, 3]
    spec = sparse.text.cache_spec(2, 2)
    assert (spec.paged.num_layers, spec.paged.num_kv_heads, spec.states[0].num_layers) == (2, 1, 2)
    assert spec.states[0].layer_bytes == 4 * 3 * 24 * 40 + 3 * (2 * 24 + 3 * 40) * 2
    for change in ({"layer_types": ["full_attention"] * 6}, {"attn_output_gate": False}, {"mamba_ssm_dtype": "bfloat16"}):
        write(tmp_path, **{name: value for name, value in change.items() if name != "layer_types"})
        if "layer_types" in change:
            text = (tmp_path / "config.json").read_text().replace("linear_attention", "full_attention")
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=next(iter(change))):
            read_config(tmp_path)
