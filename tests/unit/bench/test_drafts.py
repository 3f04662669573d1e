"""The drafter of `bench drafts --accept`, which replaces drafts by ones that are accepted with a given probability."""

import pytest

from bench.accepting import AcceptingDrafter
from tests.unit.scheduler.simulation import Simulation, make_core

ACCEPTED, DRAFTS = 0.7, 4


def test_drafts_are_accepted_as_often_as_asked() -> None:
    """The same prompts twice, of which the first time makes a record."""
    core = make_core(num_blocks=400, max_num_batched_tokens=64, verify_rows=32)
    core.proposer = AcceptingDrafter(32, ACCEPTED, DRAFTS)
    sim = Simulation(core)
    sim.worker.refuse_rate = 0.0
    for rid in range(6):
        sim.ask(rid, [20, 21 + rid % 3], [], 300, ignore_eos=True)
        sim.run()
        assert rid >= 3 or core.state.counters.drafts == 0
    assert all(sim.received[rid] == sim.received[rid + 3] for rid in range(3))
    counters = core.state.counters
    expected = sum(ACCEPTED ** (i + 1) for i in range(DRAFTS))  # accepted drafts of a row, up to the first wrong one
    assert counters.accepted_draft_tokens / counters.drafts == pytest.approx(expected, abs=0.35)
    assert counters.draft_tokens >= DRAFTS * counters.drafts - 3 * DRAFTS
