"""How split attention's work is cut, also with the kernel in torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.models.backends.hopper.attention_step import Step
from tests.unit.models.backends.hopper.kernels_in_torch import use_torch_kernels

pytest.importorskip("triton")  # beside the kernel that is replaced
from models.kernels.hopper import flash_decoding
from models.kernels.hopper.flash_decoding import Split, SplitKernel
from models.kernels.paged import PagedAttention
from models.kernels.work_items import MIN_TILES, ROWS, TILE, group_tokens, max_token_groups, plan_work_items


def check(step: Step, spare_groups: int = 0) -> int:
    """Compare with the reference, in a backend of more token groups. Returns the number of split-KV work items."""
    num_heads = step.q.shape[1]
    size = group_tokens(num_heads, step.pool[0].shape[2])
    groups = max_token_groups(len(step.q), len(step.layout.kv_lens_cpu), size) + spare_groups
    backend = PagedAttention([step.pool], [Split(SplitKernel([step.pool], num_heads), groups)], len(step.layout.pages))
    backend.plan(step.layout)
    torch.testing.assert_close(backend.run(0, step.q).double(), step.expected(), rtol=1e-5, atol=1e-5)
    return int((backend._plans[0][:, 4] > 0).sum())


@pytest.fixture(autouse=True)
def many_items(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch_kernels(monkeypatch)
    monkeypatch.setattr(flash_decoding, "BLOCKS", 64)


def test_decode_rows() -> None:
    lengths = [1, 15, 16, 17, 64, 65, 1000, 5000]
    for length in lengths:
        assert check(Step.build([length], heads=(2, 1))) == -(-length // (MIN_TILES * TILE)), length
    assert check(Step.build(lengths, heads=(4, 2), head_dim=32, page=128), spare_groups=5) >= len(lengths)


def test_chunks_of_a_padded_step() -> None:
    tokens = [1, 2, 3, 5, 9, 16, 17, 0, 0, 1, 1]
    for heads, context in (((1, 1), 47), ((4, 1), 600), ((16, 1), 0)):
        step = Step.build([count and context + count for count in tokens], heads, page=1, tokens=tokens)
        groups = sum(-(-count // group_tokens(*heads)) for count in tokens)
        assert (check(step, spare_groups=5) > groups) == (context == 600)


def test_a_chunk_across_the_last_tiles() -> None:
    for length in (*range(64, 72), 79, 80, 81, 95, 96, 97):
        check(Step.build([length], heads=(1, 1), tokens=[17]))


@given(seed=st.integers(0, 10**6))
def test_work_items(seed: int) -> None:
    """Every key once; no more items than allowed; none longer than needed; longest first; equal groups are cut only if all are; several
    tokens never end before the second tile of a last part."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 257))
    lens = rng.integers(1, [2, 500, 5000, 100_000][seed % 4], rows).astype(np.int32)
    if seed % 5 == 0:
        lens[rng.integers(rows)] = 250_000
    limit = rows + int(rng.integers(1, 200))
    number = np.arange(rows)
    items = plan_work_items(np.stack((number, number % 4 + 1, number * 7, lens), axis=1).astype(np.int32), limit)
    row, num_tokens, first_page, start, stop, index, first, parts = items.T
    tiles = -(-lens // TILE)
    shortest = next(length for length in range(1, 5000) if (-(-tiles // length)).sum() <= limit)
    assert len(items) <= limit and sorted(index) == list(range(len(items)))
    assert (parts == -(-tiles // max(shortest, MIN_TILES))[row]).all()
    assert (first_page == row * 7).all() and (num_tokens == row % 4 + 1).all()
    assert (np.diff(stop - start) <= 0).all() and (start % TILE == 0).all()
    order = np.argsort(index)
    ends = np.append(first[order][1:] != first[order][:-1], True)
    assert (stop[order][ends] == lens).all() and (start[order][1:][~ends[:-1]] == stop[order][:-1][~ends[:-1]]).all()
    assert (start[order][np.roll(ends, 1)] == 0).all() and (row[order][ends] == np.arange(rows)).all()
    assert (stop - start >= ROWS)[(parts > 1) & (index == first + parts - 1)].all() and ROWS <= TILE
