"""All that the policy decides on, the only ways in which it changes, and the invariants that relate its parts.

add ──▶ waiting ──▶ start ──▶ running ──▶ stop ──▶ stopping ──▶ release
           ▲                     │
           └────── preempt ◀─────┘

The core follows the life of requests and the policy decides; both change requests, blocks and images by the methods of `State` alone.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine.messages import Chunk, FinishReason, ImageSource, StepPlan, WantedPixels
from engine.scheduler.blocks import BlockPool
from engine.scheduler.images import ImageDirectory, ImageEntry
from engine.scheduler.request import Request, Status
from models.step_sizes import StepSizes


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may do. `bytes_per_image_token` is what the workers' cache takes for one image token."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    max_num_encoder_tokens: int
    mixed_step_tokens: int  # most tokens of a step that decodes and prefills, unless much more waits
    bytes_per_image_token: int
    step_sizes: StepSizes
    prefix_cache: bool = True
    snapshot_blocks: int = 0  # that hold a snapshot of a row's recurrent states; 0: the model has none


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
    """All requests and what they share. `running` and `waiting` are in the order of `Request.order`."""

    limits: Limits
    blocks: BlockPool
    images: ImageDirectory
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    stopping: set[Request] = field(default_factory=set)
    free_rows: list[int] = field(default_factory=list)
    wanted: list[WantedPixels] = field(default_factory=list)  # not sent yet
    saving: list[list[int]] = field(default_factory=list)  # blocks of snapshots that plans in flight make
    counters: Counters = field(default_factory=Counters)
    num_steps: int = 0

    def add(self, request: Request) -> None:
        """To its place in the queue."""
        request.status = Status.WAITING
        insort(self.waiting, request, key=_order)

    def start(self, request: Request, hits: Sequence[int], num_equal: int) -> None:
        """A waiting request gets a row, and its beginning from the blocks that have it. Behind `num_equal` blocks, cached but not
        with their states, another sequence branched off."""
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        self.blocks.acquire(hits)
        request.status, request.row, request.blocks = Status.RUNNING, self.free_rows.pop(), list(hits)
        request.leader, request.num_shared_blocks = None, 0
        request.branch_point = num_equal * self.blocks.block_size
        request.num_computed, request.num_committed = len(hits) * self.blocks.block_size, len(hits)
        while request.first_needed < len(request.images) and request.images[request.first_needed].end <= request.num_computed:
            request.first_needed += 1
        first = request.siblings[0]
        if request.num_cached < 0 and first.num_cached >= 0:
            request.num_cached = first.num_cached  # the beginning was computed for this very request
        elif request.num_cached < 0:
            request.num_cached = min(request.num_computed, request.num_prompt)
            self.counters.cached_prompt_tokens += request.num_cached
            self.counters.images_skipped += request.first_needed

    def preempt(self, request: Request) -> None:
        """Sends a running request back to its place in the queue; it recomputes what the prefix cache forgets."""
        self.running.remove(request)
        self._take_all(request)
        request.num_computed = request.num_committed = request.first_needed = 0
        self.add(request)
        self.counters.preemptions += 1

    def stop(self, request: Request) -> None:
        """No further chunks. It keeps what it has until its plans in flight have landed."""
        (self.waiting if request.status is Status.WAITING else self.running).remove(request)
        request.status = Status.STOPPING
        self.stopping.add(request)

    def release(self, request: Request) -> None:
        """A stopping request is gone. It names nobody any more, itself among them: a cycle would wait for the garbage collector, which
        comes once in thousands of requests."""
        self.stopping.remove(request)
        self._take_all(request)
        request.siblings, request.leader = [], None

    def follow(self, request: Request, leader: Request, num_shared_blocks: int) -> None:
        """A waiting request waits for its beginning, which an older one computes."""
        request.leader, request.num_shared_blocks = leader, num_shared_blocks

    def want_pixels(self, request: Request, index: int) -> None:
        """Image `index` is a file and has to be encoded: the processor is asked, once."""
        request.awaited.add(request.images[index].hash)
        self.wanted.append(WantedPixels(request.rid, index))

    def take_pixels(self, request: Request, digest: bytes, source: ImageSource) -> None:
        """They have come."""
        request.awaited.remove(digest)
        request.sources[digest] = source

    def pin_images(self, request: Request, indexes: Sequence[int]) -> list[tuple[int, ImageEntry]]:
        """Keeps these images from eviction. Returns those that the device lacks, by index, with the room that was made for them: whoever
        calls has counted that there is enough."""
        for index in indexes:  # what is on the device or on the host stays there when `reserve` evicts
            digest = request.images[index].hash
            if self.images.get(digest) is None:
                self.images.host.hold(digest)
            elif index not in request.pins:
                self._pin(request, index)
                self.counters.images_hit += 1
        lacking = []
        for index in indexes:
            if index not in request.pins:
                span = request.images[index]
                if self.images.get(span.hash) is None:
                    entry = self.images.reserve(span.hash, span.length * self.limits.bytes_per_image_token)
                    assert entry is not None, "room was counted before"
                    lacking.append((index, entry))
                else:
                    self.counters.images_hit += 1
                self._pin(request, index)
        return lacking

    def unpin_image(self, request: Request, index: int) -> None:
        """Its last token is computed by a plan; nothing to do if the request was preempted behind that."""
        if index in request.pins:
            request.pins.remove(index)
            self.images.unpin(request.images[index].hash)

    def forget_image(self, digest: bytes) -> None:
        """An embedding turned out to be wrong: it leaves the caches, whoever has it pinned."""
        for request in (*self.running, *self.stopping):
            for index in [index for index in request.pins if request.images[index].hash == digest]:
                self.unpin_image(request, index)
        self.images.forget(digest)

    def advance(self, request: Request, chunk: Chunk, num_images: int) -> None:
        """A chunk of the request, which completes so many images, is in the plan."""
        request.blocks.extend(chunk.blocks)
        if chunk.snapshot:
            self.saving.append(chunk.snapshot)
        request.num_computed = chunk.start + chunk.length - len(chunk.drafts)
        request.num_drawn += chunk.sample
        request.first_needed += num_images
        request.num_in_flight += 1

    def note_plan(self, plan: StepPlan) -> None:
        """A plan is made: it will be sent."""
        self.num_steps += 1
        self.counters.images_encoded += len(plan.encodes)
        self.counters.images_restored += len(plan.restores)
        self.counters.computed_tokens += sum([chunk.length for chunk in plan.chunks])

    def land(self, request: Request, chunk: Chunk, drawn: list[int]) -> tuple[list[int], FinishReason | None]:
        """The result of a chunk is in: the ids that it drew, of which all but the last one were drafts. Full blocks are offered to the
        directory. Returns the ids that count, since what follows an end is cut off, and whether the request ends."""
        request.num_in_flight -= 1
        if chunk.snapshot:
            self._keep_snapshot(request, chunk)
        if request.status is Status.STOPPING:
            return [], None
        kept, reason = drawn, None
        for i, token_id in enumerate(drawn):
            reason = request.append(token_id)
            if reason is not None:
                kept = drawn[: i + 1]
                break
        num_computed = chunk.start + chunk.length - len(chunk.drafts)
        if chunk.sample:
            request.num_drawn -= 1
            request.drafts = ()
            num_computed += len(kept) - 1
        if request.status is Status.RUNNING:
            request.num_computed = max(request.num_computed, num_computed)
            self._commit(request, num_computed)
        return kept, reason

    def check(self) -> None:
        """Asserts every invariant that relates requests, blocks, images and rows."""
        self.blocks.check()
        self.images.check()
        holders = [*self.running, *self.stopping]
        self.blocks.check_refs([*self.saving, *(request.blocks for request in holders)])
        for queue in (self.waiting, self.running):
            assert all(older.order < younger.order for older, younger in pairwise(queue)), "out of order"
        for request in self.waiting:
            assert not request.blocks and not request.pins and request.row < 0
            assert request.leader is None or request.leader.order < request.order, "waits for a younger one"
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

    def _pin(self, request: Request, index: int) -> None:
        self.images.pin(request.images[index].hash)
        request.pins.add(index)

    def _commit(self, request: Request, num_computed: int) -> None:
        """Names the full blocks up to `num_computed`: never before the result of the step that computed them is in."""
        full = num_computed // self.blocks.block_size
        if full <= request.num_committed:
            return
        if self.limits.prefix_cache:
            request.name_blocks(num_computed)
            for i in range(request.num_committed, full):
                self.blocks.commit(request.blocks[i], request.hasher.links[i])
        request.num_committed = full

    def _keep_snapshot(self, request: Request, chunk: Chunk) -> None:
        """The states behind a chunk are in its snapshot's blocks, unless its request has ended or was preempted."""
        self.saving.remove(chunk.snapshot)
        end = chunk.start + chunk.length
        if request.status is Status.RUNNING:
            request.name_blocks(end)
            self.blocks.commit_snapshot(chunk.snapshot, request.hasher.links[end // self.blocks.block_size - 1])
        else:
            self.blocks.release(chunk.snapshot)

    def _take_all(self, request: Request) -> None:
        """Takes row, blocks and pins. Plans in flight may still use them: workers execute in plan order."""
        for index in request.pins:
            self.images.unpin(request.images[index].hash)
        request.pins.clear()
        self.blocks.release(request.blocks)
        request.blocks = []
        if request.row >= 0:
            self.free_rows.append(request.row)
            request.row = -1


def _order(request: Request) -> tuple[int, int]:
    return request.order
