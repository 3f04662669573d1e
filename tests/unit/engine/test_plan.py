"""What `--plan` says is what workers measured, weights are counted as they lie, and small cards get smaller steps."""

import functools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from engine.config import GIB, EngineConfig
from engine.plan import ENOUGH_TOKENS, SMALLEST, cuts, estimate, fit, make_plan, weight_bytes
from models.config.huggingface import read_config
from models.config.types import ModelConfig
from models.scaffold import SHAPES
from models.scaffold.configs import config_json, generation_config_json, image_processor_json, video_processor_json

H200, H100 = 139.3, 78.7  # GiB that were free on those that the figures below are of


@functools.cache
def config_of(size: str, with_head: bool = False) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("config", config_json(SHAPES[size])), ("generation_config", generation_config_json(SHAPES[size]))):
            (Path(folder) / f"{name}.json").write_text(json.dumps(content))
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(image_processor_json()))
        (Path(folder) / "video_preprocessor_config.json").write_text(json.dumps(video_processor_json()))
        return read_config(Path(folder), with_head=with_head)


@pytest.mark.parametrize(
    ("free", "size", "tp", "quantization", "max_num_seqs", "held", "others"),
    [
        (H200, "2B", 1, "auto", 128, 4.7, 1.9 + 1.8 + 0.8),
        (H200, "8B", 1, "auto", 128, 17.1, 2.7 + 1.3 + 1.0),
        (H200, "30B-A3B", 1, "fp8", 128, 30.8, 2.3 + 1.9 + 0.9),
        (H200, "8B", 4, "auto", 128, 6.4, 2.2 + 2.0 + 1.0),
        (H200, "32B", 4, "auto", 128, 17.9, 2.5 + 1.6 + 1.0),
        (H200, "235B-A22B", 4, "fp8", 64, 57.7, 2.7 + 2.0 + 1.0),
        (H100, "8B", 1, "auto", 128, 17.1, 2.7 + 1.3 + 1.0),
        (H100, "8B", 1, "auto", 128, 17.0, 2.8 + 1.1 + 1.0),  # --backend portable
    ],
)
def test_the_plan_is_what_workers_measured(
    free: float, size: str, tp: int, quantization: str, max_num_seqs: int, held: float, others: float
) -> None:
    """Red if a sum is off by more than 5 percent. The figures are of the workers' logs: weights and runtime; activations, graphs, tower."""
    config = EngineConfig(tp=tp, quantization=quantization, max_num_seqs=max_num_seqs)  # type: ignore[arg-type]
    plan = make_plan(config, config_of(size), int(free * GIB))
    assert (plan.needs.weights + plan.needs.runtime) / GIB == pytest.approx(held, rel=0.05)
    assert plan.needs.total / GIB == pytest.approx(held + others, rel=0.05)
    pool = int(free * GIB * config.gpu_memory_utilization) - int((held + others) * GIB) - plan.image_cache
    assert plan.kv_pool == pytest.approx(pool, rel=0.05)


@pytest.mark.parametrize("size", ["2B", "8B", "30B-A3B", "tiny", "tiny-moe", "3.5-2B", "3.5-27B", "3.5-35B-A3B", "3.5-27B with head"])
def test_weights_are_counted_as_they_lie(size: str) -> None:
    """Red if a matrix is forgotten or counted twice: norms, biases and convolutions are less. Guesses have an output matrix in float8."""
    from models.scaffold.weights import tensor_shapes

    model = config_of(size.removesuffix(" with head"), size.endswith(" with head"))
    shapes = tensor_shapes(model).values()
    matrices = sum(2 * math.prod(shape) for shape in shapes if len(shape) > 1)
    matrices += model.text.vocab_size * model.text.hidden_size if model.text.has_head else 0
    assert weight_bytes(model, 1, is_fp8=False) == pytest.approx(matrices, rel=1e-3)


@pytest.mark.parametrize(("size", "quantization", "card"), [("2B", "auto", 8), ("4B", "auto", 24), ("8B", "fp8", 24), ("8B", "auto", 24)])
def test_small_cards_serve_with_smaller_steps(size: str, quantization: str, card: int) -> None:
    """Red if a model that fits is refused, or if its context holds less than the largest image and a question."""
    model, config = config_of(size), EngineConfig(quantization=quantization)  # type: ignore[arg-type]
    fitted = fit(config, model, card * GIB)
    plan = make_plan(fitted, model, card * GIB)
    tokens = plan.num_blocks * config.block_size
    assert tokens > 3000 and plan.image_cache > 0
    assert all(SMALLEST[name] <= getattr(fitted, name) <= getattr(config, name) for name in SMALLEST)
    assert (tokens >= ENOUGH_TOKENS) or fitted.max_num_seqs == SMALLEST["max_num_seqs"]


def test_what_was_asked_for_is_kept() -> None:
    """Red if a flag is overruled, or if a large card gets smaller steps."""
    model = config_of("8B")
    assert fit(EngineConfig(), model, 80 * GIB) == EngineConfig()
    small_pool = EngineConfig(kv_cache_memory_bytes=GIB)  # fewer tokens than usual, but they fit
    assert fit(small_pool, model, 80 * GIB) == small_pool
    few_blocks = EngineConfig(num_gpu_blocks_override=512)
    assert fit(few_blocks, model, 80 * GIB) == few_blocks and make_plan(few_blocks, model, 80 * GIB).num_blocks == 512
    usual = make_plan(EngineConfig(), model, 80 * GIB)
    large_pool = EngineConfig(kv_cache_memory_bytes=usual.kv_pool + GIB)  # what it leaves is the image cache's
    plan = make_plan(large_pool, model, 80 * GIB)
    assert fit(large_pool, model, 80 * GIB) == large_pool and plan.spare == 0 and plan.image_cache == usual.image_cache - GIB
    assert fit(EngineConfig(kv_cache_memory_bytes=4 * GIB), model, 24 * GIB).max_num_batched_tokens < EngineConfig().max_num_batched_tokens
    fitted = fit(EngineConfig(max_num_seqs=100), model, 24 * GIB)
    assert fitted.max_num_seqs == 100 and fitted.max_num_batched_tokens < EngineConfig().max_num_batched_tokens
    assert "--max-num-batched-tokens" in cuts(EngineConfig(), fitted) and cuts(fitted, msgspec.structs.replace(fitted)) == ""


def test_drafts_of_rows_with_states_are_counted() -> None:
    """Red if the plan leaves out what drafts are repeated from: 13 MiB a row of 27B, which a GPU that is full by plan does not have."""
    model, config = config_of("3.5-27B"), EngineConfig(max_num_seqs=64)
    plain, *drafting = (estimate(msgspec.structs.replace(config, draft=draft), model).states for draft in ("off", "lookup", "mtp"))
    assert [states - plain for states in drafting] == [67 * 48 * count * 2 * (2 * 10_240 + 2 * 48) for count in (7, 3)]


def test_the_table_needs_no_torch() -> None:
    """Red if `mini-vlm plan` does not print the table of `--plan`, loads torch for it, or omits the requested card."""
    code = "import atexit, os, sys, engine.cli; atexit.register(lambda: 'torch' in sys.modules and os._exit(9)); engine.cli.main()"
    arguments = ["plan", "Qwen3-VL-8B", "--gpu-memory", "24G", "--quantization", "fp8"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    title, headers, line = done.stdout.strip().splitlines()
    assert "float8" in title and headers.split()[0] == "GPU" and line.split()[0] == "24"
