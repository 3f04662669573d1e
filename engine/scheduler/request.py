"""One request as the scheduler sees it: a sequence whose `num_computed` chases its `num_tokens`."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import numpy as np

from engine.scheduler.blocks import BlockHasher
from engine.wire.messages import EngineRequest, FinishReason, ImageSource, ImageSpan, PromptLogprobs, SamplingParams

MIN_SNAPSHOT_TOKENS = 256  # between snapshots
ANSWER_OPENING = 8  # tokens with which a template opens an answer, at most: a next turn need not repeat what opened the thoughts


class Status(enum.Enum):
    """WAITING (new or preempted) has no row and no blocks; RUNNING has both; STOPPING waits for its plans in flight to land."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"


@dataclass(eq=False, slots=True)
class Request:
    """One answer to a request; the others are its siblings, which share what is known of their images.

        0 ............ num_prompt ........ len(token_ids) ... num_tokens
        |-- prompt ids --|-- output ids, known --|-- drawn on the device, in flight --|
        |-------- num_computed: K/V exists after all plans sent so far -------|

    Drafts in flight are in neither number.
    Invariants: num_computed <= num_tokens; blocks cover num_computed; pins are images that the sequence is in the middle of.
    """

    wire: EngineRequest
    token_ids: np.ndarray  # int32, capacity for the whole sequence
    num_known: int  # valid entries of token_ids
    max_tokens: int
    eos_ids: frozenset[int]
    hasher: BlockHasher
    params: SamplingParams
    order: tuple[int, int]  # priority and arrival
    siblings: "list[Request]"  # all answers, by index, with this one
    index: int = 0
    status: Status = Status.WAITING
    row: int = -1
    num_computed: int = 0
    num_committed: int = 0  # blocks offered to the block directory
    num_drawn: int = 0  # sampled by plans in flight, drafts not counted
    drafts: tuple[int, ...] = ()  # guesses of what follows the last known token
    guesses: list[int] = field(default_factory=list)  # of the model's head, behind the last known token
    is_held: bool = False  # drafts are to follow the tokens on the way
    prediction: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))  # the client's, of the output
    last_step: int = 0  # that computed some of it
    num_in_flight: int = 0  # plans in flight that name this request
    num_cached: int = -1  # prompt tokens that came from the prefix cache at the first admission; -1 before it
    blocks: list[int] = field(default_factory=list)
    pins: set[int] = field(default_factory=set)  # indexes into images
    first_needed: int = 0  # images before this index are done
    leader: "Request | None" = None  # while waiting: an older request that computes this one's beginning
    num_shared_blocks: int = 0  # of that beginning
    sources: dict[bytes, ImageSource] = field(default_factory=dict)  # by hash, no files
    prompt_parts: list[PromptLogprobs] = field(default_factory=list)  # consecutive log-probabilities of the prompt, so far
    awaited: set[bytes] = field(default_factory=set)  # files whose pixels the processor was asked for
    is_stateful: bool = False  # recurrent states: a beginning needs a snapshot
    snapshot_points: tuple[int, ...] = ()  # ends of blocks at which states are kept
    branch_point: int = 0  # one more: where another sequence branched off

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
        """Drawn or known."""
        return self.num_known + self.num_drawn

    @property
    def num_output(self) -> int:
        """Generated tokens, also in flight."""
        return self.num_tokens - self.num_prompt

    @property
    def wants_tokens(self) -> bool:
        """False if enough are drawn already, or if drafts, or those to come, must wait for the results."""
        return self.num_output < self.max_tokens and not (self.num_drawn and (self.drafts or self.is_held))

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= self.num_prompt and self.num_tokens - self.num_computed == 1

    @property
    def uses_prefixes(self) -> bool:
        """False if log-probabilities of the whole prompt are wanted."""
        return self.params.prompt_logprobs is None

    @property
    def awaits_prefix(self) -> bool:
        """Until the leader has committed the shared beginning, or runs no more. A sibling's blocks need only be planned: an image that
        fails in them fails all answers."""
        leader = self.leader
        if leader is None or leader.status is not Status.RUNNING:
            return False
        if leader.wire is self.wire and not self.is_stateful:
            return leader.num_computed < self.num_shared_blocks * self.hasher.block_size
        return leader.num_committed < self.num_shared_blocks

    def note_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Add those of a chunk. After a preemption chunks come again, and may be cut otherwise."""
        start = self.prompt_parts[-1].end if self.prompt_parts else part.start
        if part.end > start:
            self.prompt_parts.append(part.beginning_at(start))

    def num_shared_with(self, other: "Request") -> int:
        """Tokens of the common beginning: one salt, equal ids and images."""
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
        """A drawn token's id has come; why it ends the request, if it does."""
        self.token_ids[self.num_known] = token_id
        self.num_known += 1
        if token_id in self.params.stop_token_ids or (token_id in self.eos_ids and not self.params.ignore_eos):
            return "stop"
        return "length" if self.num_known - self.num_prompt >= self.max_tokens else None

    def next_snapshot(self, start: int, end: int) -> int | None:
        """The first position behind `start` and up to `end` at which states are kept."""
        if not self.is_stateful:
            return None
        return min((point for point in (*self.snapshot_points, self.branch_point) if start < point <= end), default=None)

    def name_blocks(self, end: int) -> None:
        """Hashes the full blocks up to token `end`, as far as ids are known."""
        self.hasher.extend(self.known_ids()[:end])

    def known_ids(self) -> np.ndarray:
        """int32 (num_known,)."""
        return self.token_ids[: self.num_known]


def snapshot_points(num_prompt: int, images: Sequence[ImageSpan], block_size: int, num_answers: int) -> tuple[int, ...]:
    """Where the states of a prompt are kept, at ends of blocks: before the answer is opened, and behind images that other questions may
    follow; of images close to each other, behind the last one. Further answers go on from the last token."""
    ends = [span.end // block_size * block_size for span in images]
    last = max(0, num_prompt - ANSWER_OPENING) // block_size * block_size
    spaced = [end for end, later in pairwise([*ends, last]) if later - end >= MIN_SNAPSHOT_TOKENS]
    return (*spaced, last, *([(num_prompt - 1) // block_size * block_size] if num_answers > 1 else []))
