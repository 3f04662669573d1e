"""A brute-force worker without tensors: it stores what every KV slot and every embedding *means*, and checks each plan against that."""

import hashlib
import random
from collections import deque
from collections.abc import Collection
from typing import Literal

import msgspec
import numpy as np

from engine.scheduler.adapters import AdapterDirectory
from engine.scheduler.blocks import BlockPool
from engine.scheduler.core import SchedulerCore
from engine.scheduler.drafts import make_drafter
from engine.scheduler.drafts.lookup import LookupDrafter
from engine.scheduler.drafts.mtp import HeadDrafter
from engine.scheduler.images import ImageDirectory
from engine.scheduler.policy import STEP_PART_WORTH_WAITING, PlannedStep
from engine.scheduler.request import Request, Status
from engine.scheduler.state import Limits
from engine.scheduler.state import State as SchedulerState
from engine.wire.adapters import AdapterRead, AdapterRef, number_of
from engine.wire.messages import (
    ON_DEVICE,
    Chunk,
    EngineRequest,
    ErrorInfo,
    ImageSource,
    ImageSpan,
    Pixels,
    Region,
    SamplingParams,
    StepPlan,
    StepResult,
    WantedPixels,
    for_adapter,
)
from engine.wire.stats import Stages
from engine.wire.step_sizes import HOPPER
from tests.unit.scheduler.invariants import check_core, check_state

EOS = 7
PLACEHOLDER = 99
TOKEN_BYTES = 10  # of an embedding
TURN = 16  # so many steps are neither quick nor late, then so many quick, and so many late

Key = int | tuple[int, int]
State = tuple[int, bytes]  # tokens, and what they mean
NOTHING: State = (0, b"")


def make_core(
    *,
    num_blocks: int = 24,
    block_size: int = 4,
    image_tokens: int = 20,
    num_ranks: int = 1,
    num_slots: int = 0,
    verify_rows: int = 0,
    **limits: object,
) -> SchedulerCore:
    defaults: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_num_mixed_tokens": 8,
        "max_num_encoder_tokens": 16,
        "mixed_step_tokens": 312,
        "bytes_per_image_token": TOKEN_BYTES,
        "step_sizes": HOPPER,
    }
    merged = Limits(**{**defaults, **limits})
    images, adapters = ImageDirectory(image_tokens * TOKEN_BYTES), AdapterDirectory(num_slots, num_ranks)
    state = SchedulerState(merged, BlockPool(num_blocks, block_size), images, adapters, free_rows=list(range(merged.max_num_seqs)))
    drafter = make_drafter("mtp" if merged.num_lookahead else "lookup", verify_rows) if verify_rows else None
    return SchedulerCore(state, num_ranks, 10_000, frozenset([EOS]), proposer=drafter)


def make_source(digest: bytes, encoding: Literal["rgb", "file"]) -> ImageSource:
    return ImageSource(encoding, Region(1, int.from_bytes(digest[:4], "little"), 0), 1, 1)


def make_request(
    rid: int, prompt: list[int], images: list[tuple[int, int, bytes]], max_tokens: int, files: Collection[int] = (), **params: object
) -> EngineRequest:
    """`images` are (start, length, name); those whose indexes are `files` come without pixels."""
    spans = []
    for i, (start, length, name) in enumerate(images):
        digest = hashlib.sha256(name).digest()
        spans.append(ImageSpan(digest, start, length, (1, 2, 2 * length), make_source(digest, "file" if i in files else "rgb")))
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return EngineRequest(rid, Region(1, 0, 4 * len(prompt)), spans, sampling, Stages())


def with_adapter(wire: EngineRequest, adapter: AdapterRef) -> EngineRequest:
    """The same request; if the adapter changes embeddings, its images are others."""
    spans = [for_adapter(span, adapter) for span in wire.images]
    spans = [msgspec.structs.replace(span, source=make_source(span.hash, span.source.encoding)) for span in spans]
    return msgspec.structs.replace(wire, images=spans, adapter=adapter)


def key_of(rid: int, index: int) -> Key:
    """Of an answer: of the first one the request's."""
    return (rid, index) if index else rid


def pairs(step: PlannedStep) -> list[tuple[Request, Chunk]]:
    return list(zip(step.requests, step.plan.chunks, strict=True))


class SimulatedWorker:
    """Executes plans on meanings. Raises AssertionError when a plan reads what is not there, or encodes what is."""

    def __init__(self, block_size: int, rng: random.Random):
        self.block_size = block_size
        self.rng = rng
        self.slots: dict[tuple[int, int], bytes] = {}
        self.written: list[dict[tuple[int, int], bytes]] = []  # by each step
        self.images: dict[int, bytes] = {}
        self.tables: dict[int, list[int]] = {}
        self.states: dict[int, State] = {}  # of rows
        self.saved: dict[int, tuple[int, int, State]] = {}  # by block: which part of how many, and of what
        self.saved_by: dict[int, int] = {}  # by block: in which step
        self.is_stateful = False
        self.refuse_rate = 0.1
        self.head_drafts: dict[int, tuple[Sequence, int, list[int]]] = {}  # by row: of which sequence, behind so many tokens, and which
        self.reported: list[list[list[int]]] = []  # by step: the head's drafts of its rows before it
        self.num_loaded = self.num_overwritten = 0
        self.adapters: dict[int, int] = {-1: 0}  # numbers by slot
        self.row_slots: dict[int, int] = {}
        self.num_loads = 0

    def execute(self, step: PlannedStep, sequences: dict[Key, "Sequence"]) -> list[list[int]]:
        plan = step.plan
        self.written.append({})
        self.num_loads += len(plan.loads)
        self.adapters |= {load.slot: load.adapter.number for load in plan.loads}
        for image_id in plan.evict:
            del self.images[image_id]
        for admit in plan.admits:
            self.row_slots[admit.row] = admit.slot
            self.tables[admit.row] = list(admit.blocks)
            self.head_drafts.pop(admit.row, None)
            self.states[admit.row] = self._load(admit.snapshot)
        for block in (block for chunk in plan.chunks for block in chunk.blocks):
            self.num_overwritten += self.saved.pop(block, None) is not None
        for encode in plan.encodes:
            assert encode.image_id not in self.images
            digest = step.made[encode.image_id]
            assert digest not in self.images.values(), "encoded although cached"
            assert encode.source == make_source(digest, "rgb"), "encoded without its pixels"
            of_tower = {
                number_of(one.wire.adapter)
                for one in step.requests
                if one.wire.adapter and one.wire.adapter.has_tower
                for span in one.images
                if span.hash == digest
            }
            assert self.adapters[encode.slot] in (of_tower or {0}), "encoded with another adapter"
            self.images[encode.image_id] = digest
        self._check_only_overlapping(plan)
        tokens, reported, sampled = [], [], []
        for request, chunk in pairs(step):
            assert self.adapters[self.row_slots[chunk.row]] == number_of(request.wire.adapter), "computed with another adapter"
            sequence = sequences[key_of(request.rid, request.index)]
            self.tables[chunk.row].extend(chunk.blocks)
            end = chunk.start + chunk.length - len(chunk.proposed)
            self._compute(sequence, chunk.row, chunk.start, end)
            self._save(plan.step, chunk)
            drafts = self._drafts_of(sequence, chunk)
            self._write_drafts(sequence, chunk.row, end, drafts)
            covered = {ref.start + i: (self.images[ref.image_id], ref.offset + i) for ref in chunk.visual for i in range(ref.length)}
            wanted = {p: v for p, v in sequence.visual.items() if chunk.start <= p < chunk.start + chunk.length}
            assert covered == wanted, "the chunk's image tokens are not exactly those of the prompt"
            if chunk.sample:
                assert end == len(sequence.ids)
                reported.append(self.head_drafts.get(chunk.row, (sequence, 0, []))[2])
                tokens.append(self._verify(sequence, drafts))
                sampled.append((chunk.row, sequence))
                if self.is_stateful:  # the drafts that hold are repeated before the row's next token
                    self.states[chunk.row] = end + len(tokens[-1]) - 1, sequence.meanings()[end + len(tokens[-1]) - 2]
        self.head_drafts |= {row: (sequence, len(sequence.ids), sequence.peek(plan.num_proposed)) for row, sequence in sampled}
        self.reported.append(reported)
        return tokens

    def _drafts_of(self, sequence: "Sequence", chunk: Chunk) -> tuple[int, ...]:
        if ON_DEVICE not in chunk.proposed:
            return chunk.proposed
        owner, num_tokens, drafts = self.head_drafts[chunk.row]
        assert owner is sequence and num_tokens == len(sequence.ids), "verifies drafts of something else"
        assert len(drafts) >= len(chunk.proposed), "verifies more drafts than there are"
        return tuple(drafts[: len(chunk.proposed)])

    @staticmethod
    def _check_only_overlapping(plan: StepPlan) -> None:
        used = {ref.image_id for chunk in plan.chunks for ref in chunk.visual}
        assert {encode.image_id for encode in plan.encodes} <= used, "an image was encoded that no chunk overlaps"

    def _load(self, blocks: list[int]) -> State:
        if not blocks:
            return NOTHING
        self.num_loaded += 1
        state = self.saved[blocks[0]][2]
        assert [self.saved[block] for block in blocks] == [(i, len(blocks), state) for i in range(len(blocks))], "not one snapshot"
        return state

    def _save(self, step: int, chunk: Chunk) -> None:
        for i, block in enumerate(chunk.snapshot):
            self.saved[block] = (i, len(chunk.snapshot), self.states[chunk.row])
            self.saved_by[block] = step
            for offset in range(self.block_size):
                self.slots.pop((block, offset), None)

    def _compute(self, sequence: "Sequence", row: int, start: int, end: int) -> None:
        table = self.tables[row]
        meanings = sequence.meanings()
        if self.is_stateful:
            assert self.states[row] == ((start, meanings[start - 1]) if start else NOTHING), "goes on from another state"
            self.states[row] = end, meanings[end - 1]
        for position in range(end):
            slot = (table[position // self.block_size], position % self.block_size)
            if position < start:
                assert self.slots.get(slot) == meanings[position], f"token {position} reads KV of something else"
            else:
                self._write(slot, meanings[position])

    def _write(self, slot: tuple[int, int], meaning: bytes) -> None:
        self.slots[slot] = self.written[-1][slot] = meaning

    def lose(self, step: PlannedStep) -> None:
        """The step was given up: nothing of it is there, unless a later one has put something else in its place."""
        later = {slot for written in self.written[step.plan.step + 1 :] for slot in written}
        for slot in self.written[step.plan.step].keys() - later:  # another request may have put the very same there
            self.slots.pop(slot, None)  # or a snapshot is there
        for block in (block for chunk in step.plan.chunks for block in chunk.snapshot):
            if self.saved_by[block] == step.plan.step:
                self.saved.pop(block, None)
        self.images |= {image_id: b"" for image_id in step.made if image_id in self.images}

    def _write_drafts(self, sequence: "Sequence", row: int, end: int, drafts: tuple[int, ...]) -> None:
        before = sequence.meanings()[end - 1]
        for position, draft in enumerate(drafts, end):
            before = sequence.meaning(before, position, draft)
            self._write((self.tables[row][position // self.block_size], position % self.block_size), before)

    def _verify(self, sequence: "Sequence", drafts: tuple[int, ...]) -> list[int]:
        """The drafts up to the first one that does not hold, and one token more. A sampler may refuse one that is as good as any."""
        sampled = [sequence.sample()]
        for draft in drafts:
            if draft != sampled[-1] or self.rng.random() < self.refuse_rate:
                break
            sampled.append(sequence.sample())
        return sampled


class Sequence:
    """A request's ground truth: the ids sampled so far depend on the ids alone, so recomputation must reproduce them."""

    def __init__(self, wire: EngineRequest, prompt: list[int], seed: int, language: tuple[int, int] | None = None):
        self.wire, self.seed, self.language = wire, seed, language
        self.index = seed - wire.params.seed
        self.ids = list(prompt)
        self.visual = {s.start + i: (s.hash, i) for s in wire.images for i in range(s.length)}
        self._meanings: list[bytes] = []

    def meanings(self) -> list[bytes]:
        while len(self._meanings) < len(self.ids):
            i = len(self._meanings)
            before = self._meanings[-1] if i else repr(self.wire.namespace).encode()
            self._meanings.append(self.meaning(before, i, self.ids[i]))
        return self._meanings

    def meaning(self, before: bytes, position: int, token_id: int) -> bytes:
        return hashlib.sha256(before + repr((token_id, self.visual.get(position))).encode()).digest()

    def sample(self) -> int:
        """In a language, in which texts repeat themselves, the last tokens, one or more, say what follows."""
        meaning = self.meanings()[-1]
        if self.language is not None:
            meaning = hashlib.sha256(repr((self.language, self.ids[-self.language[0] :])).encode()).digest()
        token = next_token(meaning, self.seed)
        self.ids.append(token)
        return token

    def peek(self, count: int) -> list[int]:
        ids, meanings = len(self.ids), len(self.meanings())
        sampled = [self.sample() for _ in range(count)]
        del self.ids[ids:], self._meanings[meanings:]
        return sampled

    def propose(self, rng: random.Random) -> tuple[int, ...]:
        before, drafts = self.meanings()[-1], []
        num_right = rng.randint(0, 7)
        for i in range(rng.randint(1, 7)):
            drafts.append(next_token(before, self.seed) if i < num_right else rng.randrange(40))
            before = self.meaning(before, len(self.ids) + i, drafts[-1])
        return tuple(drafts)


def next_token(meaning: bytes, seed: int) -> int:
    return (int.from_bytes(meaning[:2], "little") + 17 * seed) % 40


class Simulation:
    """Core and worker with results that land late; `step` plans as far ahead as the real loop does."""

    def __init__(self, core: SchedulerCore, rng: random.Random | None = None, num_ranks: int = 1):
        self.core, self.rng, self.num_ranks = core, rng or random.Random(0), num_ranks
        self.worker = SimulatedWorker(core.state.blocks.block_size, self.rng)
        self.worker.is_stateful = core.state.limits.snapshot_blocks > 0
        self.sequences: dict[Key, Sequence] = {}
        self.in_flight: deque[tuple[PlannedStep, list[list[int]], list[int]]] = deque()
        self.terminal: dict[Key, str] = {}
        self.received: dict[Key, list[int]] = {}
        self.released: set[int] = set()
        self.bad_images: set[bytes] = set()
        self.bad_files: set[bytes] = set()
        self.asked: list[WantedPixels] = []  # every question of the core's
        self.open: list[WantedPixels] = []  # those without an answer
        self.answers = True
        self.reads: list[AdapterRef] = []  # adapters that are being read
        self.give_up_rate = 0.0  # of steps that run out of memory
        self.given_up: set[int] = set()
        self.draft_rate = 0.0  # share of requests that get drafts before a step, also while results are in flight
        self.num_accepted = self.num_refused = 0  # drafts that held, and those that did not
        self.num_cut = 0  # requests of which some tokens were sampled behind their end
        self.language: tuple[int, int] | None = None  # of answers
        self.preempt_rate = 0.0  # of steps before which the youngest request has to go, as if blocks were lacking

    def add(self, wire: EngineRequest, prompt: list[int]) -> None:
        for index in range(wire.n):
            self.sequences[key_of(wire.rid, index)] = Sequence(wire, prompt, wire.params.seed + index, self.language)
        self.core.add(wire, np.asarray(prompt, dtype=np.int32))
        self._take()

    def ask(self, rid: int, prompt: list[int], images: list[tuple[int, int, bytes]], max_tokens: int, **params: object) -> None:
        self.add(make_request(rid, prompt, images, max_tokens, **params), prompt)

    def abort(self, rid: int, index: int | None = None) -> None:
        self.core.abort(rid, index)
        for key, sequence in self.sequences.items():
            if sequence.wire.rid == rid and index in (None, sequence.index):
                self.terminal.setdefault(key, "aborted by the client")
        self._take()

    def step(self) -> bool:
        """One turn of the loop. False if nothing was in flight and nothing could be planned."""
        if self.core.state.running and self.rng.random() < self.preempt_rate:
            self.core.state.preempt(self.core.state.running[-1])
        for request in self.core.state.running:
            if not request.proposed and self.rng.random() < self.draft_rate:
                request.proposed = self.sequences[key_of(request.rid, request.index)].propose(self.rng)
        while self.core.num_in_flight < self.core.depth and (planned := self._plan()) is not None:
            step, num_waiting = planned
            failed = [image_id for image_id, digest in step.made.items() if digest in self.bad_images]
            self.in_flight.append((step, self.worker.execute(step, self.sequences), failed))
            if self.rng.random() < self.give_up_rate:
                self.given_up.add(step.plan.step)
            self._check_state()
            self._check_budgets(step)
            self._check_drafts(step, num_waiting)
            self._check_nobody_repeats(step)
        self._take()
        self.reads += [order.adapter for order in self.core.state.adapters.take_reads()]
        if self.reads and (not self.in_flight or self.rng.random() < 0.5):
            for _ in range(self.core._num_ranks):
                self.core.take(AdapterRead(self.reads[0].number, True))
            self.reads.clear()
            if not self.in_flight:
                return True
        while self.open and self.answers and (not self.in_flight or self.rng.random() < 0.5):
            self.answer(self.open[self.rng.randrange(len(self.open))])
            if not self.in_flight:
                return True
        if not self.in_flight:
            return False
        step, tokens, failed = self.in_flight.popleft()
        for rank in range(self.num_ranks):
            failed_here = failed if rank == self.num_ranks - 1 else []
            flat, counts = [token for sampled in tokens for token in sampled], [len(sampled) for sampled in tokens]
            counts = counts if max(counts, default=1) > 1 else []
            ids = flat if rank == 0 else []
            turn = step.plan.step // TURN % 3
            times = {"launched": 1.0, "done": 2.0, "forward_ms": 1.0 if turn == 1 else 9.0, "is_late": turn == 2}
            drafts = self.worker.reported[step.plan.step] if rank == 0 else []
            result = StepResult(rank, step.plan.step, ids, failed_here, **times, num_tokens=counts, proposed=drafts)
            if step.plan.step in self.given_up:
                result = StepResult(rank, step.plan.step, [], [], 1.0, 2.0, out_of_memory=rank == 0)
            self.core.collect(result)
        if step.plan.step in self.given_up:
            self.worker.lose(step)
            later = (pair for after, *_ in self.in_flight for pair in pairs(after))
            readers = [request for request, chunk in later if any(ref.image_id in step.made for ref in chunk.visual)]
            assert all(request.status is Status.STOPPING for request in [*step.requests, *readers]), "goes on from what was not computed"
        self._count_drafts(step, tokens)
        assert not any(self.core.state.images.get(step.made[image_id]) for image_id in failed), "an image that failed is kept"
        self._check_state()
        self._take()
        return True

    def answer(self, wanted: WantedPixels) -> None:
        self.open.remove(wanted)
        digests = {index: self.sequences[wanted.rid].wire.images[index].hash for index in wanted.indexes}
        sources = {index: make_source(digest, "rgb") for index, digest in digests.items()}
        error = ErrorInfo(503, "") if self.bad_files & set(digests.values()) else None
        self.core.take(Pixels(wanted.rid, {} if error else sources, error))
        self._check_state()
        self._take()

    def run(self, max_steps: int = 5_000) -> None:
        """Until every request has ended. AssertionError if that takes too long: no progress."""
        for _ in range(max_steps):
            if not self.step():
                break
        assert not self.core.num_requests, "requests are left and nothing can run: deadlock"
        check_core(self.core)
        assert self.released == {sequence.wire.rid for sequence in self.sequences.values()}

    def _check_state(self) -> None:
        check_state(self.core.state)

    def _count_drafts(self, step: PlannedStep, tokens: list[list[int]]) -> None:
        accepted = sum(len(sampled) - 1 for sampled in tokens)
        self.num_accepted += accepted
        self.num_refused += sum(len(chunk.proposed) for chunk in step.plan.chunks) - accepted
        requests = (request for request, chunk in pairs(step) if chunk.sample)
        for request, sampled in zip(requests, tokens, strict=True):
            self.num_cut += request.status is Status.STOPPING and EOS in sampled[:-1]

    def _check_drafts(self, step: PlannedStep, num_waiting: int) -> None:
        drafting = {request for before, *_ in list(self.in_flight)[:-1] for request, chunk in pairs(before) if chunk.proposed}
        assert not drafting & set(step.requests), "a row goes on although its drafts are in flight"
        if isinstance(self.core.proposer, LookupDrafter | HeadDrafter) and any(chunk.proposed for chunk in step.plan.chunks):
            assert not num_waiting, "drafts before prompts"
            self._check_drafter(step, self.core.proposer._verify_rows)

    def _plan(self) -> tuple[PlannedStep, int] | None:
        num_waiting = len(self.core.state.waiting)
        return (step, num_waiting) if (step := self.core.next_step()) is not None else None

    def _check_drafter(self, step: PlannedStep, verify_rows: int) -> None:
        """Drafts come beside rows that decode, all of them but those that wait for their own drafts, and few enough."""
        state, chunks = self.core.state, step.plan.chunks
        assert all(chunk.start >= request.num_prompt for request, chunk in pairs(step)), "drafts beside prompts"
        assert all(chunk.sample and chunk.length == 1 + len(chunk.proposed) <= 8 for chunk in chunks)
        assert sum(chunk.length for chunk in chunks) <= max(verify_rows, len(chunks))
        waiting = {request for request in state.running if request.num_sampled and (request.proposed or request.is_held)}
        done = {request for request in state.running if request.num_output >= request.max_tokens}
        assert set(state.running) == set(step.requests) | waiting | done, "a row is delayed by others' drafts"

    def _check_budgets(self, step: PlannedStep) -> None:
        plan, limits = step.plan, self.core.state.limits
        assert sum(chunk.length for chunk in plan.chunks) <= limits.max_num_batched_tokens, "too many tokens"
        assert sum(encode.grid[2] // 2 for encode in plan.encodes) <= limits.max_num_encoder_tokens, "too many image tokens"
        new_rows = {admit.row for admit in plan.admits}
        outputs = [chunk for request, chunk in pairs(step) if chunk.start >= request.num_prompt and chunk.sample]
        streams = [chunk for chunk in outputs if chunk.length == 1 + len(chunk.proposed)]
        if any(chunk.row not in new_rows for chunk in streams):
            others = sum(chunk.length for chunk in plan.chunks) - len(streams)
            assert others <= (limits.max_num_mixed_tokens or limits.step_sizes.max_mixed_prefill), "streams stall"

    def _check_nobody_repeats(self, step: PlannedStep) -> None:
        state = self.core.state
        size = state.blocks.block_size
        worth = max(size, int(STEP_PART_WORTH_WAITING * state.limits.max_num_batched_tokens))
        rows = {admit.row: len(admit.blocks) for admit in step.plan.admits}
        for request in [request for request in state.running if request.row in rows and state.limits.prefix_cache]:
            if request.is_stateful and request.wire.n > 1:
                continue  # without room for a snapshot each answer computes the prompt again
            mine = self.sequences[key_of(request.rid, request.index)].meanings()[: request.num_known - 1]
            for older in [other for other in state.running if other.order < request.order and other.wire is not request.wire]:
                theirs = self.sequences[key_of(older.rid, older.index)].meanings()[: older.num_known]
                num_shared = sum(a == b for a, b in zip(mine, theirs, strict=False))
                num_known = max(older.num_committed, rows[request.row])
                assert (num_shared // size - num_known) * size < worth, "computes what another one is computing"

    def _take(self) -> None:
        outputs = self.core.take_outputs(None, 0.0)
        for output in outputs.outputs:
            key = key_of(output.rid, output.index)
            assert key not in self.terminal, "output after the terminal event"
            self.received.setdefault(key, []).extend(output.token_ids)
            if output.error is not None:
                self.terminal[key] = "error"
            elif output.finish_reason is not None:
                self.terminal[key] = output.finish_reason
        for wanted in outputs.wanted:
            images = [self.sequences[wanted.rid].wire.images[index] for index in wanted.indexes]
            assert images and all(span.source.encoding == "file" for span in images), "asked for pixels that it has"
            assert len({span.hash for span in images}) == len(images), "asked twice for the same pixels"
            self.asked.append(wanted)
            self.open.append(wanted)
        for rid in outputs.released:
            assert rid not in self.released, "released twice"
            keys = {key for key, sequence in self.sequences.items() if sequence.wire.rid == rid}
            assert keys <= self.terminal.keys(), "released without a terminal event"
            assert all(request.rid != rid for step, _, _ in self.in_flight for request in step.requests), "released while in flight"
            self.released.add(rid)
