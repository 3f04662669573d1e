"""What `--plan` says is what workers measured, weights are counted as they lie, and small cards get smaller steps."""

import functools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch

from engine.wire.config import GIB, EngineConfig
from engine.wire.memory import (
    CPU_KV_BYTES,
    ENOUGH_TOKENS,
    SMALLEST,
    Used,
    check_plan,
    cuts,
    fit,
    make_plan,
    plan_host,
    plan_memory,
    sizes_for,
    weight_bytes,
)
from engine.wire.step_sizes import HOPPER
from models.cache.states import RowStates
from models.config.huggingface import read_config
from models.config.types import ModelConfig
from models.kernels.reference.ops import TorchOps
from models.layers.eagle3 import Eagle3Head
from models.layers.linear import Setup
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder
from models.scaffold.configs import config_files
from models.weights.matrix import Place, matrices_of

H200, H100 = 139.3, 78.7  # GiB that were free on those that the figures below are of


@functools.cache
def config_of(size: str, with_head: bool = False) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in config_files(SHAPES[size]).items():
            (Path(folder) / name).write_text(json.dumps(content))
        return read_config(Path(folder), with_head=with_head)


MEASURED: list[tuple[float, str, int, Literal["auto", "fp8"], int, float, float]] = [
    (H200, "2B", 1, "auto", 128, 4.7, 1.9 + 0.3 + 0.8),
    (H200, "8B", 1, "auto", 128, 17.1, 2.7 + 0.3 + 1.0),
    (H200, "30B-A3B", 1, "fp8", 128, 30.8, 2.3 + 0.3 + 0.9),
    (H200, "8B", 4, "auto", 128, 6.4, 2.2 + 0.3 + 1.0),
    (H200, "32B", 4, "auto", 128, 17.9, 2.5 + 0.3 + 1.0),
    (H200, "235B-A22B", 4, "fp8", 64, 57.7, 2.7 + 0.2 + 1.0),
    (H100, "8B", 1, "auto", 128, 17.1, 2.7 + 0.3 + 1.0),
    (H100, "8B", 1, "auto", 128, 17.0, 2.8 + 0.3 + 1.0),  # with `portable` kernels, the others with `hopper`
]


def test_the_plan_is_what_workers_measured() -> None:
    """Red if a sum is off by more than 6 percent. Figures of workers' logs: weights and runtime; activations, graphs, tower.
    Those of graphs were computed but for 8B and 30B-A3B."""
    for free, size, tp, quantization, max_num_seqs, held, others in MEASURED:
        config = EngineConfig(tp=tp, quantization=quantization, max_num_seqs=max_num_seqs)
        plan = make_plan(config, config_of(size), int(free * GIB))
        parts = plan.parts
        needs = sum(parts.values()) - parts["image cache"] - parts["KV pool"]
        assert (parts["weights"] + parts["runtime"]) / GIB == pytest.approx(held, rel=0.05)
        assert needs / GIB == pytest.approx(held + others, rel=0.06)
        pool = int(free * GIB * config.gpu_memory_utilization) - int((held + others) * GIB) - plan.image_cache
        assert parts["KV pool"] == pytest.approx(pool, rel=0.05)


def test_advice_fits_the_cause() -> None:
    model, used = config_of("8B"), Used(weights=19 * GIB, runtime=0, encode=0, step=0, tower=0)
    spec, sizes = model.text.cache_spec(1, 2), sizes_for(model, HOPPER)
    check_plan(plan := plan_host(EngineConfig(), spec), math.inf)
    assert plan.num_blocks == CPU_KV_BYTES // spec.block_bytes(16)
    for flags, advice in (
        ({"kv_cache_memory_bytes": 4096}, "has no block: change --gpu-memory-utilization, --kv-cache-memory-bytes"),
        ({"kv_cache_memory_bytes": 8 * GIB}, "does not fit.*: change --gpu-memory-utilization, --kv-cache-memory-bytes"),
        ({}, "a KV pool of -1.*.*: change --gpu-memory-utilization"),
    ):
        with pytest.raises(ValueError, match=advice):
            check_plan(plan_memory(EngineConfig(enforce_eager=True, **flags), model, spec, sizes, used, 20 * GIB), 20 * GIB)  # type: ignore[arg-type]


def test_weights_are_counted_as_they_lie() -> None:
    """Drafts have an output matrix in float8."""
    from models.scaffold.weights import tensor_shapes

    for size in ("2B", "30B-A3B", "3.5-2B", "3.5-35B-A3B", "3.5-27B with head"):
        model = config_of(size.removesuffix(" with head"), size.endswith(" with head"))
        matrices = sum(2 * math.prod(shape) for shape in tensor_shapes(model).values() if len(shape) > 1)
        matrices += model.text.vocab_size * model.text.hidden_size if model.text.has_head else 0
        assert weight_bytes(model, 1, "plain") == pytest.approx(matrices, rel=1e-2), size


def test_small_cards_serve_with_smaller_steps() -> None:
    cases: list[tuple[str, Literal["auto", "fp8"], int]] = [("2B", "auto", 8), ("4B", "auto", 24), ("8B", "fp8", 24), ("8B", "auto", 24)]
    for size, quantization, card in cases:
        model, config = config_of(size), EngineConfig(quantization=quantization)
        fitted = fit(config, model, card * GIB)
        plan = make_plan(fitted, model, card * GIB)
        tokens = plan.num_blocks * config.block_size
        assert tokens > 3000 and plan.image_cache > 0
        assert all(SMALLEST[name] <= getattr(fitted, name) <= getattr(config, name) for name in SMALLEST)
        assert (tokens >= ENOUGH_TOKENS) or fitted.max_num_seqs == SMALLEST["max_num_seqs"]


def test_what_was_asked_for_is_kept() -> None:
    model = config_of("8B")
    plan_of, fitted = (functools.partial(function, model=model) for function in (make_plan, fit))
    few_blocks = EngineConfig(kv_cache_memory_bytes=512 * model.text.cache_spec(1, 2).block_bytes(16))
    for config in (EngineConfig(), EngineConfig(kv_cache_memory_bytes=GIB), few_blocks):  # fewer tokens than usual, but they fit
        assert fitted(config, gpu_memory=80 * GIB) == config
    assert plan_of(few_blocks, gpu_memory=80 * GIB).num_blocks == 512
    for config in (EngineConfig(kv_cache_memory_bytes=4 * GIB), EngineConfig(max_num_seqs=100)):
        small = fitted(config, gpu_memory=24 * GIB)
        assert small.max_num_batched_tokens < EngineConfig().max_num_batched_tokens
    assert small.max_num_seqs == 100
    assert "--max-num-batched-tokens" in cuts(EngineConfig(), small) and cuts(small, msgspec.structs.replace(small)) == ""


def test_drafts_of_rows_with_states_are_counted() -> None:
    """Red if the plan leaves out what drafts are repeated from: 13 MiB a row of 27B, which a GPU that is full by plan does not have."""
    model, config = config_of("3.5-27B"), EngineConfig(max_num_seqs=64)
    configs = (msgspec.structs.replace(config, draft=draft) for draft in ("off", "lookup", "mtp"))
    plain, *drafting = (make_plan(each, model, 80 * GIB).parts["states"] for each in configs)
    assert [states - plain for states in drafting] == [67 * 48 * count * 2 * (2 * 10_240 + 2 * 48) for count in (7, 3)]
    (group,) = model.text.cache_spec(1, 2).states
    assert plain == RowStates(group, 64, torch.device("meta")).values.nbytes, "a worker allocates something else"


def test_the_table_needs_no_torch() -> None:
    """Red if `mini-vlm plan` does not print the table of `--plan`, loads torch for it, or omits the requested card."""
    code = "import atexit, os, sys, engine.serve; atexit.register(lambda: 'torch' in sys.modules and os._exit(9)); engine.serve.command()"
    arguments = ["plan", "Qwen3-VL-8B", "--gpu-memory", "24G", "--quantization", "fp8"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    title, headers, line = done.stdout.strip().splitlines()
    assert "float8" in title and headers.split()[0] == "GPU" and line.split()[0] == "24"


def test_the_weights_of_a_head_are_counted(tmp_path: Path) -> None:
    """Red if a head of another checkpoint is left out, which takes 0.8 GB of bfloat16 for 8B."""
    (tmp_path / "config.json").write_text('{"intermediate_size": 12288, "draft_vocab_size": 32000}')
    write_model_folder(tmp_path / "8B", SHAPES["8B"], weights="none", seed=0)
    plain, model = (read_config(tmp_path / "8B", eagle3=folder) for folder in ("", str(tmp_path)))
    assert model.text.eagle3 is not None
    for tp in (1, 2):
        setup = Setup(TensorParallel(0, tp, None), TorchOps(), Place("torch", torch.device("meta"), torch.bfloat16))
        head = Eagle3Head(model.text.eagle3, model.text.vocab_size, setup)
        matrices = sum(each.tensor.nbytes for _, matrix in matrices_of(head) for each in matrix.storage.stored)
        expected = matrices + head.lm_head.weight.nbytes * 3 // 2  # also in float8, with scales
        assert weight_bytes(model, tp, "plain") - weight_bytes(plain, tp, "plain") == pytest.approx(expected, rel=0.05)
