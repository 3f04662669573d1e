"""The drafter that stands in for one whose drafts hold with a given probability, and the benchmark's run."""

from itertools import pairwise

import pytest

from bench.accepting import AcceptingDrafter
from bench.drafts import SETS, main
from engine.wire.stats import EngineStats
from tests.unit.scheduler.simulation import Simulation, make_core


def run_twice(probability: float, num_drafts: int) -> tuple[Simulation, EngineStats]:
    """The same prompts, of which the first time makes a record."""
    core = make_core(num_blocks=400, max_num_batched_tokens=64, verify_rows=32)
    core.proposer = AcceptingDrafter(32, probability, num_drafts)
    sim = Simulation(core)
    sim.worker.refuse_rate = 0.0
    for rid in range(6):
        sim.ask(rid, [20, 21 + rid % 3], [], 300, ignore_eos=True)
        sim.run()
        assert rid >= 3 or core.state.counters.drafts == 0
    assert all(sim.received[rid] == sim.received[rid + 3] for rid in range(3))
    return sim, core.state.counters


def test_drafts_hold_as_often_as_they_are_told_to() -> None:
    _, counters = run_twice(0.7, 4)
    tested = [counters.drafts, *counters.accepted_by_position]
    assert all(after / before == pytest.approx(0.7, abs=0.12) for before, after in pairwise(tested))
    assert counters.draft_tokens >= 4 * counters.drafts - 3 * 4


def test_the_adaptation_sees_what_does_not_hold() -> None:
    assert run_twice(0.0, 0)[1].drafts <= 3 * 5
    counters = run_twice(1.0, 0)[1]
    assert counters.accepted_draft_tokens == counters.draft_tokens > 700


def test_requests_of_a_set_are_the_same_each_time() -> None:
    assert all(make(3) == make(3) and "messages" in make(3) for make in SETS.values())


@pytest.mark.nightly
def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--model demo --device cpu --kv-cache-memory-bytes 64M"
    main(["--flags", flags, "--sets", "random", "--accept", "1.0", "--drafts", "3", "--requests", "2", "--output-tokens", "32"])
    assert "|100%|" in (out := capsys.readouterr().out.replace(" ", "")) and "2of2" in out
