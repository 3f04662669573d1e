"""A made-up model with a layer whose cache is a state of the whole row: what rows, chunks and preemption must carry for it."""

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.messages import WorkerReady
from engine.scheduler.main import make_limits
from engine.worker.memory import plan_memory
from models.attention.paged import AttentionBackend
from models.backends.torch.tuned import STEP_SIZES as CPU_STEP_SIZES
from models.batch import ForwardBatch
from models.cache import CacheSpec, PagedKV, RowState
from models.qwen3_vl import Qwen3VL
from models.scaffold import SHAPES, write_model_folder
from tests.unit.worker.in_process import Engine, load_model
from tests.unit.worker.test_graphs import SIZES

NUM_FEATURES = 16


class HybridModel(Qwen3VL):
    """The tiny model, and beside its last layer one that sums over all tokens of a row: whole numbers, so that no cut changes the sum."""

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec((*super().cache_spec.layers, RowState(4 * NUM_FEATURES)))

    def __call__(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        hidden_SD = super().__call__(batch, attention)
        (state_RX,) = batch.states
        hidden_SD[:, :NUM_FEATURES] += self._sums(batch, state_RX.view(torch.float32))[batch.logits_indices].sin()
        return hidden_SD

    def _sums(self, batch: ForwardBatch, state_RX: torch.Tensor) -> torch.Tensor:
        """(T, features) of each token and all before it in its row."""
        features_TX = (batch.input_ids_T[:, None] * torch.arange(1, NUM_FEATURES + 1)) % 7.0
        bounds = batch.attention.qo_indptr_cpu.tolist()
        for row, (start, end) in zip(batch.rows, pairwise(bounds), strict=True):
            if start < end:
                begins = (batch.positions_3T[:, start] == 0).all()
                features_TX[start] += torch.where(begins, 0.0, state_RX[row])
                features_TX[start:end] = features_TX[start:end].cumsum(0)
                state_RX[row] = features_TX[end - 1]
        return features_TX


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HybridModel]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_model_folder(folder, SHAPES["tiny"], weights="random", seed=0)
    plain = load_model(folder)
    plain.__class__ = HybridModel
    assert isinstance(plain, HybridModel)
    yield plain


def prompts() -> list[list[int]]:
    """Two of them are equal but for their first token, which attention would hardly see."""
    rng = random.Random(0)
    texts = [[rng.randrange(300) for _ in range(length)] for length in (40, 17, 70, 33)]
    return [*texts, [(texts[0][0] + 1) % 300, *texts[0][1:]]]


@pytest.fixture(scope="module")
def alone(model: HybridModel) -> list[list[int]]:
    """Each prompt alone in a fresh engine, in one chunk."""
    results = []
    for prompt in prompts():
        engine = Engine(model, prefix_cache=False)
        engine.add(0, [prompt], max_tokens=24)
        results.append(engine.run()[0])
    assert len({tuple(tokens) for tokens in results}) == len(results), "prompts that cannot be told apart test nothing"
    return results


def serve(engine: Engine, num_steps_between: int = 1) -> list[list[int]]:
    for rid, prompt in enumerate(prompts()):
        engine.add(rid, [prompt], max_tokens=24)
        for _ in range(num_steps_between):
            engine.step()
    return list(engine.run().values())


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_equals_whole(model: HybridModel, alone: list[list[int]], chunk: int) -> None:
    """Red if the state is lost between two chunks of a row, or if a chunk finds another row's."""
    engine = Engine(model, prefix_cache=False, max_num_batched_tokens=8 + chunk, max_num_mixed_tokens=chunk)
    assert serve(engine) == alone


def test_preempted_equals_alone(model: HybridModel, alone: list[list[int]]) -> None:
    """Red if a row that is given to somebody else, or begun anew after a preemption, goes on from the state that is left in it."""
    engine = Engine(model, num_blocks=6, max_num_seqs=3, prefix_cache=False, max_num_batched_tokens=24, max_num_mixed_tokens=12)
    assert serve(engine, num_steps_between=0) == alone
    assert engine.core.state.counters.preemptions > 0


def test_graphs_of_decode_rows_carry_the_state(model: HybridModel, alone: list[list[int]]) -> None:
    """Red if a graph reads the rows of the step that it was captured with, or if padding writes to a row that somebody has."""
    engine = Engine(model, graphs=True, sizes=SIZES.without_prompts(), prefix_cache=False, max_num_seqs=5, max_num_batched_tokens=64)
    assert serve(engine) == alone


def test_a_prefix_is_not_shared_where_a_layer_has_a_state(model: HybridModel) -> None:
    """Red if a request goes on behind a cached prefix without the state that belongs there."""
    ready = WorkerReady(0, 10, 1, 1, CPU_STEP_SIZES, has_state=bool(model.cache_spec.state_bytes))
    assert not make_limits(EngineConfig(), ready).prefix_cache
    assert make_limits(EngineConfig(), WorkerReady(0, 10, 1, 1, CPU_STEP_SIZES)).prefix_cache


def test_blocks_hold_what_the_layers_say() -> None:
    """Red if the pool is planned for layers that have no KV, or for other heads than it is allocated with."""
    spec = CacheSpec((PagedKV(2, 64, 2), RowState(1 << 20), PagedKV(4, 32, 1)))
    assert spec.bytes_per_token == 2 * (2 * 64 * 2 + 4 * 32) and spec.state_bytes == (1 << 20,)
    config = EngineConfig(kv_cache_memory_bytes=1 << 20, block_size=16)
    assert plan_memory(config, spec, None).num_blocks == (1 << 20) // (16 * spec.bytes_per_token)
