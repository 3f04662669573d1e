"""Decode attention in Triton's interpreter against torch in float64, and how its work is cut.

Red when a tile, a page or a part is skipped, read twice or read beyond the row's end, and when units pile up on the longest row.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.models.decode_step import Step
from tests.unit.models.interpreter import interpreted, run_interpreted, starts_interpreter

EDGES = [1, 15, 16, 17, 64, 65, 1000]
LONG_AND_SHORT = [3000, *[20] * 10]


@starts_interpreter
def test_decode_attention_in_the_interpreter() -> None:
    run_interpreted(__file__)


def check(step: Step, spare_rows: int = 0, tolerance: float = 1e-5) -> int:
    """Two runs of one plan, for a backend of more rows. Returns the number of units."""
    from models.layers.decode_attention import DecodeAttention, Scratch

    rows = len(step.q) + spare_rows
    scratch = Scratch.allocate([step.pool], step.q.shape[1], rows, len(step.layout.pages))
    scratch.partials_UHK.fill_(torch.nan)
    backend = DecodeAttention([step.pool], rows, scratch)
    backend.plan(step.layout)
    ours = [backend.run(0, step.q) for _ in range(2)]
    torch.testing.assert_close(ours[0].double(), step.expected(), rtol=tolerance, atol=tolerance)
    assert ours[0].equal(ours[1]) and not scratch.arrivals_UG.any()
    return int((backend._units_UF[:, 3] > 0).sum())


@pytest.fixture
def many_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with many multiprocessors."""
    from models.layers import decode_attention

    monkeypatch.setattr(decode_attention, "PROGRAMS", 64)


@interpreted
@pytest.mark.parametrize("length", [*EDGES, 5000])
def test_one_row(length: int, many_units: None) -> None:
    units = check(Step.build([length], heads=(2, 1)))
    assert units == min(-(-length // 64), 53 if length == 5000 else 64)


@interpreted
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 2), (8, 1), (16, 1), (3, 1), (32, 1)])
def test_groups_of_heads(heads: tuple[int, int], many_units: None) -> None:
    assert check(Step.build([300, 65, 1], heads)) > 3


@interpreted
@pytest.mark.parametrize(("page", "head_dim"), [(1, 16), (4, 32), (16, 128), (128, 16)])
def test_pages(page: int, head_dim: int, many_units: None) -> None:
    check(Step.build([1, 3, 130, 200], heads=(4, 2), head_dim=head_dim, page=page))
    check(Step.build([300, 290, 140], heads=(4, 2), head_dim=head_dim, page=page, shared=128 // page))


@interpreted
@pytest.mark.parametrize("lengths", [EDGES, LONG_AND_SHORT, [64] * 5, [1] * 8])
@pytest.mark.parametrize("spare_rows", [0, 5])
def test_batches(lengths: list[int], spare_rows: int) -> None:
    units = check(Step.build(lengths, heads=(2, 1)), spare_rows)
    assert len(lengths) <= units <= 1.5 * len(lengths) + 1


@interpreted
@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, [2, 100, 300, 600][seed], [64, 40, 20, 10][seed]).tolist()
    check(Step.build(lengths, heads=(2, 1), seed=seed))


@interpreted
def test_half_precision(many_units: None) -> None:
    check(Step.build(EDGES, heads=(4, 1)).to(torch.device("cpu"), torch.float16), tolerance=3e-3)


@interpreted
def test_large_scores() -> None:
    """The sum of exponentials alone would overflow."""
    step = Step.build([500, 3], heads=(2, 1))
    step.q *= 300
    check(step, tolerance=1e-4)


@interpreted
def test_decode_rows_behind_prefill_rows() -> None:
    """Of a mixed step, only the decode rows are planned."""
    from models.layers.decode_attention import DecodeAttention

    step = Step.build([100, 40, 200], heads=(2, 1))
    backend = DecodeAttention.factory([step.pool], 2, 2, max_pages=3 + 13)(2)
    backend.plan(replace(step.layout, num_prefill_rows=1))
    torch.testing.assert_close(backend.run(0, step.q[1:]).double(), step.expected()[1:], rtol=1e-5, atol=1e-5)


@interpreted
def test_backends_of_several_sizes_share_their_scratch(many_units: None) -> None:
    """As captured graphs do: plan, run, then another size."""
    from models.layers.decode_attention import DecodeAttention

    lengths = [700, 30, 1000, 5]
    pool = Step.build(lengths, heads=(2, 1)).pool
    make = DecodeAttention.factory([pool], 2, max_rows=4, max_pages=200)
    backends = {size: make(size) for size in (4, 1, 2)}
    for size in (4, 1, 2, 1, 4):
        step = Step.build(lengths[:size], heads=(2, 1), seed=size)
        for ours, theirs in zip(pool, step.pool, strict=True):
            ours[: len(theirs)] = theirs
        backends[size].plan(step.layout)
        torch.testing.assert_close(backends[size].run(0, step.q).double(), step.expected(), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("seed", range(50))
def test_units(seed: int) -> None:
    """Every token once; no more units than allowed; none longer than needed; longest first; equal rows are cut only if all are."""
    from models.layers.decode_attention import MIN_TILES, plan_units
    from models.layers.kernels_attention import TILE

    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 257))
    lens = rng.integers(1, [2, 500, 5000, 100_000][seed % 4], rows).astype(np.int32)
    if seed % 5 == 0:
        lens[rng.integers(rows)] = 250_000
    limit = rows + int(rng.integers(1, 200))
    units = plan_units(lens, np.arange(rows, dtype=np.int32) * 7, limit)
    row, first_page, start, stop, index, first, parts, _ = units.T
    tiles = -(-lens // TILE)
    shortest = next(length for length in range(1, 5000) if (-(-tiles // length)).sum() <= limit)
    assert len(units) <= limit and sorted(index) == list(range(len(units)))
    assert (parts == -(-tiles // max(shortest, MIN_TILES))[row]).all() and (first_page == row * 7).all()
    assert (np.diff(stop - start) <= 0).all() and (start % TILE == 0).all()
    order = np.argsort(index)
    ends = np.append(first[order][1:] != first[order][:-1], True)
    assert (stop[order][ends] == lens).all() and (start[order][1:][~ends[:-1]] == stop[order][:-1][~ends[:-1]]).all()
    assert (start[order][np.roll(ends, 1)] == 0).all() and (row[order][ends] == np.arange(rows)).all()
