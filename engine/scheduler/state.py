"""All that the policy decides on, and the invariants that relate its parts. Owned by `core`, changed by `policy` alone."""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from engine.messages import WantedPixels
from engine.scheduler.blocks import BlockPool
from engine.scheduler.images import ImageDirectory
from engine.scheduler.request import Request, Status


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may do. `bytes_per_image_token` is what the workers' cache takes for one image token."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    max_num_encoder_tokens: int
    bytes_per_image_token: int
    prefix_cache: bool = True
    mixed_step_tokens: int = 312  # most tokens of a step that decodes and prefills, unless much more waits


@dataclass(slots=True)
class Counters:
    """Running totals for the metrics."""

    cached_prompt_tokens: int = 0
    computed_tokens: int = 0
    images_encoded: int = 0
    images_hit: int = 0
    images_skipped: int = 0
    images_restored: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class State:
    """The policy's view of everything. `running` and `waiting` are in order of arrival."""

    limits: Limits
    blocks: BlockPool
    images: ImageDirectory
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    stopping: set[Request] = field(default_factory=set)
    free_rows: list[int] = field(default_factory=list)
    wanted: list[WantedPixels] = field(default_factory=list)  # not sent yet
    counters: Counters = field(default_factory=Counters)
    num_steps: int = 0

    def check(self) -> None:
        """Asserts every invariant that relates requests, blocks, images and rows."""
        self.blocks.check()
        self.images.check()
        holders = [*self.running, *self.stopping]
        self.blocks.check_refs(request.blocks for request in holders)
        for queue in (self.waiting, self.running):
            assert all(older.arrival < younger.arrival for older, younger in pairwise(queue)), "out of order"
        for request in self.waiting:
            assert not request.blocks and not request.pins and request.row < 0
            assert request.leader is None or request.leader.arrival < request.arrival, "waits for a younger one"
        for request in [*self.waiting, *holders]:
            assert not request.awaited & request.sources.keys() and request.awaited <= {span.hash for span in request.images}
        for request in self.running:
            assert request.status is Status.RUNNING and request.num_computed <= request.num_tokens
            assert len(request.blocks) >= self.blocks.num_needed(request.num_computed)
        rows = [request.row for request in holders if request.row >= 0]
        assert sorted([*rows, *self.free_rows]) == list(range(self.limits.max_num_seqs)), "rows leaked"
        pins: dict[bytes, int] = {}
        for request in holders:
            for index in request.pins:
                pins[request.images[index].hash] = pins.get(request.images[index].hash, 0) + 1
        for digest, count in pins.items():
            entry = self.images.get(digest)
            assert entry is None or entry.pins == count, "pins drifted from the requests"
        assert self.images.num_pinned <= len(pins)
