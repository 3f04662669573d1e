"""Which rows get drafts, how many, and from which texts."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.drafts import lookup
from engine.scheduler.drafts.lookup import CONTEXTS, LONGEST, Source
from engine.scheduler.drafts.mtp import RETRY_STEPS
from engine.scheduler.policy import PlannedStep
from engine.wire.config import MAX_HEAD_DRAFTS
from tests.unit.scheduler.simulation import PLACEHOLDER, Sequence, Simulation, make_core, make_request


def simulate() -> Simulation:
    sim = Simulation(make_core(num_blocks=400, max_num_batched_tokens=64, verify_rows=32), random.Random(0))
    sim.worker.refuse_rate = 0.0
    return sim


def add(sim: Simulation, rid: int, max_tokens: int = 80) -> None:
    prompt = [20, 21, 22, 23]
    sim.add(make_request(rid, prompt, [], max_tokens, ignore_eos=True), prompt)


def num_steps(sim: Simulation) -> int:
    before = sim.core.state.num_steps
    sim.run()
    return sim.core.state.num_steps - before


def test_an_answer_that_repeats_itself_takes_fewer_steps() -> None:
    sim = simulate()
    sim.language = (1, 5)
    add(sim, 0)
    assert num_steps(sim) < 55 and len(sim.received[0]) == 80


def simulate_head() -> Simulation:
    core = make_core(num_blocks=400, max_num_batched_tokens=64, verify_rows=32, num_lookahead=MAX_HEAD_DRAFTS)
    sim = Simulation(core, random.Random(0))
    sim.worker.refuse_rate = 0.0
    return sim


def test_a_heads_drafts_save_steps() -> None:
    sim = simulate_head()
    for rid in range(3):
        add(sim, rid)
    assert num_steps(sim) <= 2 * (1 + 79 // 4) and len(sim.received[0]) == 80


def test_a_head_with_wrong_drafts_is_rarely_used() -> None:
    sim = simulate_head()
    sim.worker.refuse_rate = 1.0
    add(sim, 0, max_tokens=400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequence, "peek", lambda self, count: [777] * count)
        asked = [sim.core.state.num_proposed for _ in range(300) if sim.step()]
        sim.run()
    assert 1 < sim.core.state.counters.drafts < 10 and asked[0] == MAX_HEAD_DRAFTS
    assert {*asked[50:]} == {0, 1} and abs(sum(asked[50:]) - 250 / RETRY_STEPS) <= 1


def test_a_head_whose_drafts_become_right_is_used_again() -> None:
    sim = simulate_head()
    sim.worker.refuse_rate = 1.0
    add(sim, 0, max_tokens=800)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequence, "peek", lambda self, count: [777] * count)
        for _ in range(100):
            sim.step()
    sim.worker.refuse_rate, wasted = 0.0, sim.core.state.counters.drafts
    assert num_steps(sim) < 10 * RETRY_STEPS + 700 // 3 and sim.core.state.counters.drafts > wasted + 100


def test_many_rows_get_fewer_drafts_and_at_last_none() -> None:
    for num_rows, most in ((1, 7), (3, 2), (4, 1), (5, 0)):
        sim = Simulation(make_core(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64, verify_rows=9), random.Random(0))
        sim.language, sim.worker.refuse_rate = (1, 5), 0.0
        for rid in range(num_rows):
            add(sim, rid)
        sent: list[PlannedStep | None] = []
        with pytest.MonkeyPatch.context() as patch:
            plan = sim.core.next_step
            patch.setattr(sim.core, "next_step", lambda plan=plan, sent=sent: sent.append(plan()) or sent[-1])
            while len(sim.terminal) < 1 and sim.step():
                pass
        assert max(len(chunk.proposed) for step in sent if step is not None for chunk in step.plan.chunks) == most


def source_of(prompt: list[int], images: list[tuple[int, int, bytes]]) -> Source:
    core = make_core(num_blocks=2000, verify_rows=32)
    core.add(make_request(0, prompt, images, 9), np.asarray(prompt, dtype=np.int32))
    return Source(core.state.waiting[0])


def text_of(source: Source) -> list[int]:
    return source._text[: source._end + source._request.num_known].tolist()


def test_a_context_does_not_reach_across_an_image() -> None:
    prompt = [30, 31, 32, *[PLACEHOLDER] * 5, 33, 34, 30, 31, 32, 33, *[PLACEHOLDER] * 5, 31, 32]
    source = source_of(prompt, [(3, 5, b"a"), (14, 5, b"b")])
    assert text_of(source) == [-1] * LONGEST + [30, 31, 32, -1, 33, 34, 30, 31, 32, 33, -1, 31, 32]
    assert [token for token, _ in source.propose(7)] == [33]


def test_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MAX_TEXT", 20)
    source = source_of(list(range(100)), [])
    assert text_of(source) == [-1] * LONGEST + [*range(80, 100)]


@given(text=st.lists(st.integers(-1, 3), min_size=2, max_size=60))
def test_a_proposal_follows_the_longest_context_that_was_seen(text: list[int]) -> None:
    text[-1] = abs(text[-1])
    padded = [-1] * LONGEST + text
    proposal = lookup.find(np.asarray(padded, dtype=np.int32), 7)
    contexts = (padded[-length:] for length in reversed(CONTEXTS) if min(padded[-length:]) >= 0)
    seen = next((tokens for context in contexts if (tokens := followers(padded, context))), [])
    assert bool(seen) or not proposal
    if seen:
        assert seen.count(proposal[0][0] if proposal else -1) == max(map(seen.count, seen))


def followers(text: list[int], context: list[int]) -> list[int]:
    length = len(context)
    return [text[end] for end in range(length, len(text)) if text[end - length : end] == context]


def test_a_preempted_request_has_no_proposed_tokens() -> None:
    core = make_core(num_lookahead=3, verify_rows=64)
    core.add(make_request(1, [1, 2, 3], [], 8), np.array([1, 2, 3], dtype=np.int32))
    step = core.next_step()
    assert step is not None and step.plan.num_proposed > 0
    (request,) = step.requests
    assert request.num_proposed == step.plan.num_proposed
    core.state.preempt(request)
    assert request.num_proposed == 0
