"""The drafter that stands in for one whose drafts hold with a given probability."""

from itertools import pairwise

import pytest

from bench.accepting import AcceptingDrafter
from tests.unit.scheduler.simulation import Simulation, make_core


def test_drafts_hold_as_often_as_they_are_told_to() -> None:
    """The same prompts twice, of which the first time makes a record."""
    core = make_core(num_blocks=400, max_num_batched_tokens=64, verify_rows=32)
    core.proposer = AcceptingDrafter(32, 0.7, 4)
    sim = Simulation(core)
    sim.worker.refuse_rate = 0.0
    for rid in range(6):
        sim.ask(rid, [20, 21 + rid % 3], [], 300, ignore_eos=True)
        sim.run()
        assert rid >= 3 or core.state.counters.drafts == 0
    assert all(sim.received[rid] == sim.received[rid + 3] for rid in range(3))
    counters = core.state.counters
    tested = [counters.drafts, *counters.accepted_by_position]
    assert all(after / before == pytest.approx(0.7, abs=0.12) for before, after in pairwise(tested))
    assert counters.draft_tokens >= 4 * counters.drafts - 3 * 4
