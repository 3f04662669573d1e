"""Which adapters are in slots, and who waits for one."""

from engine.wire.adapters import AdapterRef
from tests.unit.scheduler.simulation import Simulation, make_core, make_request, with_adapter


def ask(sim: Simulation, rid: int, number: int, max_tokens: int = 6) -> None:
    prompt = [20 + rid % 7] * 5
    wire = make_request(rid, prompt, [], max_tokens, ignore_eos=True)
    sim.add(with_adapter(wire, AdapterRef(number, f"a{number}", "", False)) if number else wire, prompt)


def running(sim: Simulation) -> set[int]:
    return {request.rid for request in sim.core.state.running}


def test_requests_without_a_slot_block_no_other() -> None:
    sim = Simulation(make_core(num_slots=1, max_num_seqs=3, num_blocks=64))
    ask(sim, 0, 1, max_tokens=30)
    sim.step()
    for rid in range(1, 9):
        ask(sim, rid, 2)
    ask(sim, 9, 0)
    ask(sim, 10, 1)
    sim.step()
    assert 9 in running(sim), "the model itself needs no slot"
    assert 10 not in running(sim), "the slot is for the adapter that waits"
    sim.run()
    assert sim.worker.num_loads == 3


def test_a_waiting_adapter_gets_the_slot_although_others_arrive() -> None:
    sim = Simulation(make_core(num_slots=2, max_num_seqs=4, num_blocks=64))
    for rid in range(40):
        ask(sim, rid, 3 if rid == 4 else 1 + rid % 2)
        if rid % 2:
            sim.step()
    while 4 not in sim.terminal:
        assert sim.step()
    assert not set(range(20, 40)) & sim.terminal.keys(), "later requests were served first"
    sim.run()


def test_the_least_recently_started_adapter_is_replaced() -> None:
    sim = Simulation(make_core(num_slots=2, num_blocks=64))
    for rid, number in enumerate((1, 2, 1, 3, 1, 2)):
        ask(sim, rid, number)
        sim.run()
    assert sim.worker.num_loads == 4, "1 stays; 3 replaces 2, which replaces 3"
