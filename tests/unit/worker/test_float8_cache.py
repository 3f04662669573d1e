"""Keys and values in float8: answers depend on it little, and on nothing that a cache must not change."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.scheduler.drafts.lookup import LookupDrafter
from models.checkpoint.load import load_cache_scales, load_weights
from models.config.huggingface import read_config
from models.decoders.qwen3_vl import Qwen3VL
from models.demo import CHECKPOINT
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder
from tests.unit.models import harness
from tests.unit.models.harness import ONE_IMAGE, TEXT, PagedRunner, Prompt
from tests.unit.worker.in_process import Engine, make_picture


def load(folder: Path, has_float8_cache: bool = True) -> Qwen3VL:
    config = read_config(folder)
    model = harness.make(replace(config, text=replace(config.text, has_float8_cache=has_float8_cache)), TensorParallel.single())
    load_weights(model, folder, lambda done, total: None)
    if has_float8_cache:
        load_cache_scales(model, folder)
    model.finish()
    return model


@pytest.fixture(scope="module")
def rounded() -> Qwen3VL:
    return load(CHECKPOINT)


def test_logits_change_little(rounded: Qwen3VL) -> None:
    plain = load(CHECKPOINT, has_float8_cache=False)
    for parts in ([[token % 700 for token in TEXT[0]]], ONE_IMAGE):
        found = []
        for model in (plain, rounded):
            runner = PagedRunner(model)
            found.append(runner.prefill(runner.start(Prompt.build(model.config, parts)), 16).softmax(dim=-1))
        assert 0 < (found[0] - found[1]).abs().sum(dim=-1).max() < 0.2


def test_chunks_prefixes_and_drafts_change_nothing(rounded: Qwen3VL) -> None:
    text, start, end = list(range(5, 60)), rounded.config.vision_start_token_id, rounded.config.vision_end_token_id
    prompts = [[text], [[*text, start], make_picture(0, 64, 96), [end, 7, 8, 9]], [[*text, start], make_picture(0, 64, 96), [end, 7]]]
    alone = []
    for prompt in prompts:
        engine = Engine(rounded, prefix_cache=False)
        engine.add(0, prompt, max_tokens=24)
        alone.append(engine.run()[0])
    for limits in ({"max_num_batched_tokens": 16, "max_num_mixed_tokens": 16}, {"drafter": LookupDrafter(32)}, {"num_blocks": 16}):
        engine = Engine(rounded, **limits)  # type: ignore[arg-type]
        for rid, prompt in enumerate(prompts):
            engine.add(rid, prompt, max_tokens=24)
        assert [engine.run()[rid] for rid in range(3)] == alone


def test_scales_of_a_checkpoint(tmp_path: Path, rounded: Qwen3VL) -> None:
    """Red if a scale is left out on one side: with them values keep their size, since a power of two rounds nothing."""
    shutil.copytree(CHECKPOINT, tmp_path / "demo")
    weights = load_file(CHECKPOINT / "model.safetensors")
    layers = [f"model.language_model.layers.{i}.self_attn" for i in range(5)]
    names = [(f"{path}.k_scale", f"{path}.v_scale") for path in layers[:2]]
    names += [(f"{path}.k_proj.k_scale", f"{path}.v_proj.v_scale") for path in layers[2:]]
    scales = {name: torch.tensor(scale) for pair in names for name, scale in zip(pair, (0.5, 0.25), strict=True)}
    save_file(weights | scales, tmp_path / "demo" / "model.safetensors")
    scaled, tokens = load(tmp_path / "demo"), []
    assert {layer.self_attn.cache_scales for layer in scaled.language_model.layers} == {(0.5, 0.25)}
    for model in (rounded, scaled):
        engine = Engine(model)
        engine.add(0, [list(range(5, 60))], max_tokens=24)
        tokens.append(engine.run()[0])
    assert tokens[0] == tokens[1]
    for bad in (0.0, -1.0, torch.inf, torch.nan):
        save_file(weights | {names[0][0]: torch.tensor(bad)}, tmp_path / "demo" / "model.safetensors")
        with pytest.raises(ValueError, match=r"k_scale must be a positive number"):
            load(tmp_path / "demo")


def test_a_block_takes_half_the_bytes(tmp_path: Path) -> None:
    write_model_folder(tmp_path, SHAPES["3.5-tiny"], weights="none", seed=0)
    text = read_config(tmp_path).text
    plain, rounded = (replace(text, has_float8_cache=one).cache_spec(1, 2) for one in (False, True))
    assert plain.block_bytes(16) == 2 * rounded.block_bytes(16) and plain.states == rounded.states
    assert abs(rounded.snapshot_blocks(16) - 2 * plain.snapshot_blocks(16)) <= 1
