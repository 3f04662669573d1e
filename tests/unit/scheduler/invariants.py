"""Invariants of the scheduler's state, and of arenas."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from engine.scheduler.adapters import AdapterDirectory
from engine.scheduler.blocks import BlockPool
from engine.scheduler.core import SchedulerCore
from engine.scheduler.images import ImageDirectory
from engine.scheduler.request import Request, Status
from engine.scheduler.state import State, is_idle


def check_core(core: SchedulerCore) -> None:
    state = core.state
    check_state(state)
    if not core.num_requests:
        assert is_idle(state) and not core.num_in_flight and not state.waiting
        assert state.blocks.num_free == state.blocks.num_blocks and state.images.num_pinned == 0
        assert not any(vars(core.proposer).get(name) for name in ("_sources", "_trust"))


def check_state(state: State) -> None:
    check_blocks(state.blocks)
    check_images(state.images)
    holders = [*state.running, *state.stopping]
    counts = Counter(block for table in (*state.saving, *(request.blocks for request in holders)) for block in table)
    assert [counts[block] for block in range(state.blocks.num_blocks)] == state.blocks._refs, "counts do not match the block tables"
    for queue in (state.waiting, state.running):
        assert all(older.order < younger.order for older, younger in pairwise(queue)), "out of order"
    for request in state.waiting:
        assert not request.blocks and not request.pins and request.row < 0
        assert request not in state.loading
        assert request.leader is None or request.leader.order < request.order, "waits for a younger one"
    for request in state.running:
        assert request.status is Status.RUNNING and request.num_computed <= request.num_tokens
        assert len(request.blocks) >= state.blocks.num_needed(request.num_computed)
    check_adapters(state.adapters, [request for request in holders if request.row >= 0])
    rows = [request.row for request in holders if request.row >= 0]
    assert sorted([*rows, *state.free_rows]) == list(range(state.limits.max_num_seqs)), "rows leaked"
    pins = Counter(request.images[index].hash for request in holders for index in request.pins)
    for digest, count in pins.items():
        entry = state.images.get(digest)
        assert entry is None or entry.pins == count, "pins do not match the requests"
    assert state.images.num_pinned <= len(pins)


def check_blocks(pool: BlockPool) -> None:
    """A block is free exactly if its count is 0; hash <-> block is one to one."""
    for block, (digest, ref) in enumerate(zip(pool._hashes, pool._refs, strict=True)):
        assert ref >= 0 and (ref == 0) == (block in pool._free)
        assert digest is None or pool._cached[digest] == block
    assert sum(digest is not None for digest in pool._hashes) == len(pool._cached)
    assert pool._snapshot_names == {block: name for name, blocks in pool._snapshots.items() for block in blocks}
    assert all(pool._refs[block] == 0 and pool._hashes[block] is None for block in pool._snapshot_names), "a snapshot's block is used"


def check_images(images: ImageDirectory) -> None:
    entries = images._entries.values()
    assert images.used_bytes == sum(entry.num_bytes for entry in entries) <= images.budget_bytes
    assert all(entry.pins >= 0 for entry in entries)
    pinned = [entry.num_bytes for entry in entries if entry.pins]
    assert (images.num_pinned, images.pinned_bytes) == (len(pinned), sum(pinned))
    assert len({entry.image_id for entry in entries}) == len(entries)


def check_adapters(adapters: AdapterDirectory, holders: Sequence[Request]) -> None:
    users = Counter(request.wire.adapter.number for request in holders if request.wire.adapter is not None)
    assert {number: held.num_users for number, held in adapters._held.items() if held.num_users} == users, "wrong user counts"
    slots = [held.slot for held in adapters._held.values()]
    assert len(set(slots)) == len(slots) <= adapters._num_slots
