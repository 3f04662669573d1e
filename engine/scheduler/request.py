"""One request as the scheduler sees it: a sequence whose `num_computed` chases its `num_tokens`. Used by policy and main."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import numpy as np

from engine.messages import EngineRequest, FinishReason, ImageSource, ImageSpan, PromptLogprobs, SamplingParams
from engine.scheduler.blocks import BlockHasher

MIN_SNAPSHOT_TOKENS = 256  # between an image's end and the next one, or the prompt's: what is kept twice within less saves little


class Status(enum.Enum):
    """WAITING has no row and no blocks (new, or preempted); RUNNING has both; STOPPING only waits for its plans in flight to land."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"


@dataclass(eq=False, slots=True)
class Request:
    """The state of one request, or of one of its answers if it wants several: siblings, which share what is known of their images.

        0 ............ num_prompt ........ len(token_ids) ... num_tokens
        |-- prompt ids --|-- output ids, known --|-- drawn on the device, in flight --|
        |-------- num_computed: K/V exists after all plans sent so far -------|

    Drafts in flight are in neither number: at least one token will be drawn, and how many hold the result says.
    Invariants: num_computed <= num_tokens; blocks cover num_computed; pins are images that the sequence is in the middle of.
    """

    wire: EngineRequest
    token_ids: np.ndarray  # int32, prompt and known output; capacity for the whole sequence
    num_known: int  # valid entries of token_ids
    max_tokens: int
    eos_ids: frozenset[int]
    hasher: BlockHasher
    params: SamplingParams
    order: tuple[int, int]  # priority and arrival: whose is lower comes first
    siblings: "list[Request]"  # all answers to the request, by index, with this one
    index: int = 0
    status: Status = Status.WAITING
    row: int = -1
    num_computed: int = 0
    num_committed: int = 0  # blocks whose content was offered to the block directory
    num_drawn: int = 0  # sampled by plans in flight, drafts not counted
    drafts: tuple[int, ...] = ()  # what somebody guesses to follow the last known token, until the next token has come
    num_in_flight: int = 0  # plans in flight that name this request
    num_cached: int = -1  # prompt tokens of the first admission that came from the prefix cache; -1 before it
    blocks: list[int] = field(default_factory=list)
    pins: set[int] = field(default_factory=set)  # indexes into images
    first_needed: int = 0  # images before this index are computed or came from the prefix cache
    leader: "Request | None" = None  # while waiting: an older request that was found to compute this one's beginning
    num_shared_blocks: int = 0  # how many blocks that beginning has
    sources: dict[bytes, ImageSource] = field(default_factory=dict)  # what workers can encode, by hash: no files
    prompt_logprobs: PromptLogprobs | None = None  # of the prompt's beginning, if they are wanted
    awaited: set[bytes] = field(default_factory=set)  # hashes of files whose pixels the processor was asked for
    is_stateful: bool = False  # the model keeps recurrent states: a beginning is of use with a snapshot behind it
    snapshot_points: tuple[int, ...] = ()  # positions at ends of blocks behind which states are kept, if there is room
    branch_point: int = 0  # one more: as far as blocks of another sequence are equal

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
        """Tokens whose ids exist, on the host or on the device."""
        return self.num_known + self.num_drawn

    @property
    def num_output(self) -> int:
        """Generated tokens, those in flight included."""
        return self.num_tokens - self.num_prompt

    @property
    def wants_tokens(self) -> bool:
        """False when enough tokens are drawn already and only their results are awaited, or when drafts must wait for them."""
        return self.num_output < self.max_tokens and not (self.drafts and self.num_drawn)

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= self.num_prompt and self.num_tokens - self.num_computed == 1

    @property
    def uses_prefixes(self) -> bool:
        """False if every token of the prompt has to be computed, because its log-probability is wanted."""
        return self.params.prompt_logprobs is None

    @property
    def awaits_prefix(self) -> bool:
        """True until the leader has committed the whole shared beginning, or does not run any more. A sibling's blocks need only be
        planned: what may turn out wrong in them, an image, fails all of them."""
        leader = self.leader
        if leader is None or leader.status is not Status.RUNNING:
            return False
        if leader.wire is self.wire and not self.is_stateful:
            return leader.num_computed < self.num_shared_blocks * self.hasher.block_size
        return leader.num_committed < self.num_shared_blocks

    def note_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Those of a chunk have come. After a preemption chunks come again, and may be cut otherwise."""
        known = self.prompt_logprobs
        if known is None or part.end > known.end:
            self.prompt_logprobs = part if known is None else known.extended(part)

    def num_shared_with(self, other: "Request") -> int:
        """Tokens of the common beginning: under one salt, of equal ids and images. Compares instead of hashing: 10 us for 30k tokens."""
        if self.wire.cache_salt != other.wire.cache_salt:
            return 0
        end = min(self.num_known, other.num_known)
        for mine, theirs in zip_longest(self.images, other.images):
            if mine is None or theirs is None or (mine.hash, mine.start) != (theirs.hash, theirs.start):
                end = min([end, *(span.start for span in (mine, theirs) if span is not None)])
                break
        differs = self.token_ids[:end] != other.token_ids[:end]
        return int(differs.argmax()) if differs.any() else end

    def append(self, token_id: int) -> FinishReason | None:
        """A drawn token's id has come. Whether it ends the request."""
        self.token_ids[self.num_known] = token_id
        self.num_known += 1
        if token_id in self.params.stop_token_ids or (token_id in self.eos_ids and not self.params.ignore_eos):
            return "stop"
        return "length" if self.num_known - self.num_prompt >= self.max_tokens else None

    def next_snapshot(self, start: int, end: int) -> int | None:
        """The first position behind `start` and up to `end` at which states are kept."""
        points = (*self.snapshot_points, self.branch_point) if self.is_stateful else ()
        return min((point for point in points if start < point <= end), default=None)

    def name_blocks(self, end: int) -> None:
        """Hashes the full blocks up to token `end`, as far as ids are known, if that has not been done."""
        self.hasher.extend(self.known_ids()[:end])

    def known_ids(self) -> np.ndarray:
        """int32 ids of the prompt and the known output."""
        return self.token_ids[: self.num_known]


def snapshot_points(num_prompt: int, images: Sequence[ImageSpan], block_size: int) -> tuple[int, ...]:
    """Where the states of a prompt are kept: at its end, before the last token, and at ends of runs of images, which other questions may
    follow. At ends of blocks; of ends of images that are close to each other, at the last one."""
    ends = [span.end // block_size * block_size for span in images]
    last = (num_prompt - 1) // block_size * block_size
    spaced = [end for end, later in pairwise([*ends, last]) if later - end >= MIN_SNAPSHOT_TOKENS]
    return (*spaced, last)
