"""How split attention's work is cut, also through the kernel's arithmetic in torch; the kernel itself is tested on GPUs.

Red when a page or a part is skipped, taken twice or named wrongly, when a token of a chunk sees a later one or misses an earlier one, and
when units pile up on the longest row.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.models.backends.hopper.attention_step import Step
from tests.unit.models.backends.hopper.kernels_in_torch import use_torch_kernels

pytest.importorskip("triton")  # beside the kernel that is replaced
from models.kernels.hopper import flash_decoding
from models.kernels.hopper.flash_decoding import FlashDecoding
from models.kernels.units import MIN_TILES, ROWS, TILE, group_tokens, max_token_groups, plan_units, token_groups

EDGES = [1, 15, 16, 17, 64, 65, 1000]
LONG_AND_SHORT = [3000, *[20] * 10]


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch_kernels(monkeypatch)


def check(step: Step, spare_groups: int = 0) -> int:
    """For a backend of more token groups. Returns the number of units."""
    num_heads = step.q.shape[1]
    size = group_tokens(num_heads, step.pool[0].shape[2])
    groups = max_token_groups(len(step.q), len(step.layout.kv_lens_cpu), size) + spare_groups
    backend = FlashDecoding.factory([step.pool], num_heads, groups, len(step.layout.pages))(groups)
    backend.plan(step.layout)
    torch.testing.assert_close(backend.run(0, step.q).double(), step.expected(), rtol=1e-5, atol=1e-5)
    return int((backend._units_UF[:, 4] > 0).sum())


@pytest.fixture
def many_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with many multiprocessors."""
    monkeypatch.setattr(flash_decoding, "BLOCKS", 64)


@pytest.mark.parametrize("length", [*EDGES, 5000])
def test_one_row(length: int, many_units: None) -> None:
    units = check(Step.build([length], heads=(2, 1)))
    assert units == -(-length // (MIN_TILES * TILE))


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 2), (8, 1), (16, 1)])
def test_groups_of_heads(heads: tuple[int, int], many_units: None) -> None:
    assert check(Step.build([300, 65, 1], heads)) > 3


@pytest.mark.parametrize(("page", "head_dim"), [(1, 16), (4, 32), (16, 128), (128, 16)])
def test_pages(page: int, head_dim: int, many_units: None) -> None:
    check(Step.build([1, 3, 130, 200], heads=(4, 2), head_dim=head_dim, page=page))
    check(Step.build([300, 290, 140], heads=(4, 2), head_dim=head_dim, page=page, shared=128 // page))


@pytest.mark.parametrize("lengths", [EDGES, LONG_AND_SHORT, [64] * 5, [1] * 8])
@pytest.mark.parametrize("spare_groups", [0, 5])
def test_batches(lengths: list[int], spare_groups: int) -> None:
    units = check(Step.build(lengths, heads=(2, 1)), spare_groups)
    assert len(lengths) <= units <= 1.5 * len(lengths) + 1


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, [2, 100, 300, 600][seed], [64, 40, 20, 10][seed]).tolist()
    check(Step.build(lengths, heads=(2, 1), seed=seed))


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 2)])
@pytest.mark.parametrize("context", [0, 30, 47, 600])
def test_chunks(heads: tuple[int, int], context: int, many_units: None) -> None:
    """Chunks of all lengths around a group of tokens in one step: around one or two tiles of keys, which are one unit, and of many."""
    tokens = [1, 2, 3, 4, 5, 9, 16, 17]
    step = Step.build([context + count for count in tokens], heads, tokens=tokens)
    groups = sum(-(-count // group_tokens(*heads)) for count in tokens)
    assert (check(step) > groups) == (context == 600)


@pytest.mark.parametrize("length", [*range(64, 72), 79, 80, 81, 95, 96, 97])
def test_a_chunk_across_the_last_tiles(length: int, many_units: None) -> None:
    """Red if a token has no key in the first tile of a part: its result would be NaN."""
    check(Step.build([length], heads=(1, 1), tokens=[17]))


@pytest.mark.parametrize("page", [1, 16, 128])
def test_a_padded_step(page: int, many_units: None) -> None:
    """As in a graph: prompts, padding, empty rows, then decode rows."""
    tokens = [9, 1, 6, 0, 0, 1, 1]
    check(Step.build([3000, 1, 6, 0, 0, 500, 1], heads=(4, 1), page=page, tokens=tokens), spare_groups=5)


@pytest.mark.parametrize("seed", range(6))
def test_random_chunks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, group = int(rng.integers(1, 8)), 2 ** int(rng.integers(5))
    tokens = rng.integers(0, 18, rows)
    lengths = np.where(tokens > 0, tokens + rng.integers(0, [2, 40, 300][seed % 3], rows), 0)
    check(Step.build([3000, *lengths.tolist()], heads=(group, 1), tokens=[5, *tokens.tolist()], seed=seed))


def test_decode_rows_behind_prefill_rows() -> None:
    """Of a mixed step, only the decode rows are planned."""
    step = Step.build([100, 40, 200], heads=(2, 1), tokens=[7, 1, 1])
    backend = FlashDecoding.factory([step.pool], 2, 2, max_pages=3 + 13)(2)
    backend.plan(replace(step.layout, num_prefill_rows=1).decode_rows())
    torch.testing.assert_close(backend.run(0, step.q[7:]).double(), step.expected()[7:], rtol=1e-5, atol=1e-5)


def test_backends_of_several_sizes_share_their_scratch(many_units: None) -> None:
    """As captured graphs do: plan, run, then another size."""
    lengths = [700, 30, 1000, 5]
    pool = Step.build(lengths, heads=(2, 1)).pool
    make = FlashDecoding.factory([pool], 2, max_groups=4, max_pages=200)
    backends = {size: make(size) for size in (4, 1, 2)}
    for size in (4, 1, 2, 1, 4):
        step = Step.build(lengths[:size], heads=(2, 1), seed=size)
        for ours, theirs in zip(pool, step.pool, strict=True):
            ours[: len(theirs)] = theirs
        backends[size].plan(step.layout)
        torch.testing.assert_close(backends[size].run(0, step.q).double(), step.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(50))
def test_units(seed: int) -> None:
    """Every key once; no more units than allowed; none longer than needed; longest first; equal groups are cut only if all are; several
    tokens never end before the second tile of a last part."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 257))
    lens = rng.integers(1, [2, 500, 5000, 100_000][seed % 4], rows).astype(np.int32)
    if seed % 5 == 0:
        lens[rng.integers(rows)] = 250_000
    limit = rows + int(rng.integers(1, 200))
    number = np.arange(rows)
    units = plan_units(np.stack((number, number % 4 + 1, number * 7, lens), axis=1).astype(np.int32), limit)
    row, num_tokens, first_page, start, stop, index, first, parts = units.T
    tiles = -(-lens // TILE)
    shortest = next(length for length in range(1, 5000) if (-(-tiles // length)).sum() <= limit)
    assert len(units) <= limit and sorted(index) == list(range(len(units)))
    assert (parts == -(-tiles // max(shortest, MIN_TILES))[row]).all()
    assert (first_page == row * 7).all() and (num_tokens == row % 4 + 1).all()
    assert (np.diff(stop - start) <= 0).all() and (start % TILE == 0).all()
    order = np.argsort(index)
    ends = np.append(first[order][1:] != first[order][:-1], True)
    assert (stop[order][ends] == lens).all() and (start[order][1:][~ends[:-1]] == stop[order][:-1][~ends[:-1]]).all()
    assert (start[order][np.roll(ends, 1)] == 0).all() and (row[order][ends] == np.arange(rows)).all()
    assert (stop - start >= ROWS)[(parts > 1) & (index == first + parts - 1)].all() and ROWS <= TILE


@pytest.mark.parametrize("seed", range(20))
def test_token_groups(seed: int) -> None:
    """Every query token once, with its row's pages, up to its own key; no more groups than a graph has room for."""
    rng = np.random.default_rng(seed)
    rows, size = int(rng.integers(1, 20)), int(rng.integers(1, 17))
    tokens = rng.integers(0, 40, rows)
    lengths = np.where(tokens > 0, tokens + rng.integers(0, 100, rows), 0)
    layout = Step.build(lengths.tolist(), heads=(1, 1), tokens=tokens.tolist()).layout
    found, expected = [], []
    for first, count, first_page, end in token_groups(layout, size).tolist():
        found += [(first + i, first_page, end - count + 1 + i) for i in range(count)]
        assert 1 <= count <= size
    for row, (count, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
        first, first_page = int(layout.qo_indptr_cpu[row]), int(layout.page_indptr_cpu[row])
        expected += [(first + i, first_page, length - count + 1 + i) for i in range(count)]
    assert found == expected
    assert sum(-(-count // size) for count in tokens.tolist()) == len(token_groups(layout, size))
    assert len(token_groups(layout, size)) <= max_token_groups(int(tokens.sum()), rows, size)
