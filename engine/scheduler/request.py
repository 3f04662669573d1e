"""One request in the scheduler: a sequence whose `num_computed` approaches its `num_tokens`."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import numpy as np

from engine.scheduler.blocks import BlockHasher
from engine.wire.messages import EngineRequest, FinishReason, ImageSource, ImageSpan, SamplingParams
from engine.wire.reports import Report

MIN_SNAPSHOT_TOKENS = 256  # minimum distance between snapshots
ANSWER_OPENING = 8  # most tokens of a template's answer opening: a next turn need not repeat it


class Status(enum.Enum):
    """Request status. WAITING (new or preempted) has no row and no blocks; RUNNING has both; STOPPING waits for its plans in flight to
    land."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"


@dataclass(eq=False, slots=True)
class Request:
    """One answer to a request; all its answers share `wire` and `sources`.

        0 ............ num_prompt ........ len(token_ids) ... num_tokens
        |-- prompt ids --|-- output ids, known --|-- sampled on the device, in flight --|
        |-------- num_computed: K/V exists after all plans sent so far -------|

    Proposed tokens in flight are in neither number.
    Invariants: num_computed <= num_tokens; blocks cover num_computed; pins are images that the sequence is in the middle of.
    """

    wire: EngineRequest
    token_ids: np.ndarray  # int32, capacity for the whole sequence
    num_known: int  # valid entries of token_ids
    max_tokens: int
    eos_ids: frozenset[int]
    hasher: BlockHasher
    params: SamplingParams
    order: int  # of arrival
    index: int = 0
    status: Status = Status.WAITING
    row: int = -1
    slot: int = -1  # -1 without a row, or if it needs no slot
    num_computed: int = 0
    num_committed: int = 0  # blocks offered to the block directory
    num_sampled: int = 0  # sampled by plans in flight, without proposed tokens
    proposed: tuple[int, ...] = ()  # after the last known token; steps verify them
    num_proposed: int = 0  # tokens that workers propose after its last sample
    is_held: bool = False  # waits for tokens in flight: some will be proposed after them
    num_in_flight: int = 0  # plans in flight that name this request
    num_cached: int = -1  # prompt tokens that came from the prefix cache at the first admission; -1 before it
    blocks: list[int] = field(default_factory=list)
    pins: set[int] = field(default_factory=set)  # indexes into images
    first_needed: int = 0  # images before this index are done
    leader: "Request | None" = None  # while waiting: an older request that computes this one's beginning
    num_shared_blocks: int = 0  # blocks of that prefix
    sources: dict[bytes, ImageSource] = field(default_factory=dict)  # by hash, without files; of all answers
    reports: list[Report] = field(default_factory=list)  # consecutive parts received so far
    is_stateful: bool = False  # the model has recurrent states: a prefix needs a snapshot
    snapshot_points: tuple[int, ...] = ()  # ends of blocks at which states are kept
    branch_point: int = 0  # additional end at which another sequence branched off

    @property
    def rid(self) -> int:
        return self.wire.rid

    @property
    def images(self) -> list[ImageSpan]:
        return self.wire.images

    @property
    def num_prompt(self) -> int:
        return self.wire.prompt.length // 4

    @property
    def num_tokens(self) -> int:
        return self.num_known + self.num_sampled

    @property
    def num_output(self) -> int:
        """Number of generated tokens, including those in flight."""
        return self.num_tokens - self.num_prompt

    @property
    def wants_tokens(self) -> bool:
        """False if enough tokens are sampled, or if tokens proposed now or later must wait for the results."""
        return self.num_output < self.max_tokens and not (self.num_sampled and (self.proposed or self.is_held))

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= self.num_prompt and self.num_tokens - self.num_computed == 1

    @property
    def tower_slot(self) -> int:
        """Slot of the adapter with which images are encoded; -1: none."""
        adapter = self.wire.adapter
        return self.slot if adapter is not None and adapter.has_tower else -1

    @property
    def has_started(self) -> bool:
        """True if an answer to the same request was in a plan."""
        return self.wire.stages.admitted > 0

    @property
    def awaits_prefix(self) -> bool:
        """True until the leader has committed the shared prefix or stopped running."""
        leader = self.leader
        return leader is not None and leader.status is Status.RUNNING and leader.num_committed < self.num_shared_blocks

    def num_shared_with(self, other: "Request") -> int:
        """Number of tokens of the common prefix: equal namespace, ids and images."""
        if self.wire.namespace != other.wire.namespace:
            return 0
        end = min(self.num_known, other.num_known)
        for mine, theirs in zip_longest(self.images, other.images):
            if mine is None or theirs is None or (mine.hash, mine.start) != (theirs.hash, theirs.start):
                end = min([end, *(span.start for span in (mine, theirs) if span is not None)])
                break
        differs = self.token_ids[:end] != other.token_ids[:end]
        return int(differs.argmax()) if differs.any() else end

    def append(self, token_id: int) -> FinishReason | None:
        """Append the id of a sampled token; return the finish reason if it ends the request."""
        self.token_ids[self.num_known] = token_id
        self.num_known += 1
        if token_id in self.params.stop_token_ids or (token_id in self.eos_ids and not self.params.ignore_eos):
            return "stop"
        return "length" if self.num_known - self.num_prompt >= self.max_tokens else None

    def next_snapshot(self, start: int, end: int) -> int | None:
        """Return the first position in (`start`, `end`] at which states are kept."""
        if not self.is_stateful:
            return None
        return min((point for point in (*self.snapshot_points, self.branch_point) if start < point <= end), default=None)

    def name_blocks(self, end: int) -> None:
        self.hasher.extend(self.known_ids()[:end])

    def known_ids(self) -> np.ndarray:
        """Known ids, int32 (num_known,)."""
        return self.token_ids[: self.num_known]


def snapshot_points(num_prompt: int, images: Sequence[ImageSpan], block_size: int) -> tuple[int, ...]:
    """Return the block ends at which a prompt's states are kept: before the answer opens, and after images that other questions may follow
    (of neighbouring images, after the last)."""
    ends = [span.end // block_size * block_size for span in images]
    last = max(0, num_prompt - ANSWER_OPENING) // block_size * block_size
    spaced = [end for end, later in pairwise([*ends, last]) if later - end >= MIN_SNAPSHOT_TOKENS]
    return (*spaced, last)
