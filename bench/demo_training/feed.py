"""Worker processes that draw pictures, compose conversations and fill batches in shared memory. Used by `train`; no torch.

Each worker keeps a pool of recent pictures and composes conversations from it, so that a drawn picture is asked about in several contexts.
"""

import multiprocessing
from collections.abc import Sequence
from multiprocessing.queues import Queue
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.demo_training.data import Batch, Conversation, Encoder, GridTable, Packer, Prepared, Sizes, empty_batch, prepare
from models.demo import ask, smalltalk
from models.demo.questions import MAX_PICTURES, Turn, arrange
from models.demo.scenes import Scene, pick, random_scene

TRAINING_STREAM = 2
POOL = 1500  # pictures a worker keeps
USES = 4.0  # how often a picture is used before it is replaced, on average
TEXT_SHARE = 0.04

WEIGHTS = {
    "number": 6.0, "shape": 2.0, "colour": 3.0, "word": 2.0, "where": 1.5, "which": 3.5, "count": 1.0, "describe": 2.5, "missing": 0.6,
}  # fmt: skip
LIST_WEIGHT = 6.0


class Composer:
    """Draws pictures of the difficulty in force and makes conversations about them."""

    def __init__(self, rng: np.random.Generator, encoder: Encoder) -> None:
        self.rng, self.encoder = rng, encoder
        self.numbered: list[Prepared] = []
        self.others: list[Prepared] = []

    def refill(self, level: float, pictures: int) -> None:
        """Draw this many new pictures; the oldest give way. Numbers get half of the pool."""
        for _ in range(pictures):
            easier = level * (1.0 if self.rng.random() < 0.8 else self.rng.random())
            prepared = prepare(self.rng, random_scene(self.rng, easier))
            (self.numbered if prepared.scene.find("number") else self.others).append(prepared)
        for pool in (self.numbered, self.others):
            del pool[: max(0, len(pool) - POOL // 2)]

    def conversation(self, level: float) -> Conversation:
        """A conversation of one to eight pictures, or now and then of text alone."""
        rng = self.rng
        system = pick(rng, smalltalk.SYSTEMS) if rng.random() < 0.2 else None
        if rng.random() < TEXT_SHARE:
            return self.encoder.conversation(system, self._small_talk(), [])
        count = self._picture_count(level)
        pool = self.numbered if rng.random() < 0.45 else self.numbered + self.others
        pictures = [pool[i] for i in rng.choice(len(pool), count, replace=False)]
        return self.encoder.conversation(system, self._turns([p.scene for p in pictures], level), pictures)

    def _picture_count(self, level: float) -> int:
        """One or two pictures at first, up to eight later; an eased level keeps some conversations short."""
        most = 1 + round((MAX_PICTURES - 1) * level)
        return 1 if self.rng.random() < 0.25 else int(self.rng.integers(1, most + 1))

    def _turns(self, scenes: list[Scene], level: float) -> list[Turn]:
        """Questions about the pictures so far; mostly all pictures come first, at times some come later."""
        rng, count = self.rng, len(scenes)
        splits = [count] if count == 1 or rng.random() < 0.8 else [int(rng.integers(1, count)), count]
        turns, shown = [], 0
        for split in splits:
            for i in range(int(rng.integers(1, 3 + count // 2 // len(splits)))):
                text, answer = self._ask(scenes[:split])
                turns.append(Turn(arrange(rng, range(shown, split) if i == 0 else (), text), answer))
                shown = split
        return turns

    def _ask(self, scenes: Sequence[Scene]) -> ask.Asked:
        rng, asked = self.rng, None
        weights = dict(WEIGHTS)
        if len(scenes) > 1 and all(scene.find("number") for scene in scenes):
            weights["list"] = LIST_WEIGHT
        names, values = list(weights), np.array(list(weights.values()))
        while asked is None:
            asked = ask_any(names[int(rng.choice(len(names), p=values / values.sum()))], rng, scenes)
        return asked

    def _small_talk(self) -> list[Turn]:
        rng, turns = self.rng, []
        for _ in range(int(rng.integers(1, 4))):
            roll = rng.random()
            if roll < 0.15:
                asked = ask.ask_missing(rng, ())
                assert asked is not None
            else:
                asked = (smalltalk.ask_talk if roll < 0.6 else smalltalk.ask_nonsense if roll < 0.8 else smalltalk.ask_count_to)(rng)
            turns.append(Turn((asked[0],), asked[1]))
        return turns


def ask_any(task: str, rng: np.random.Generator, scenes: Sequence[Scene]) -> ask.Asked | None:
    """A question of this task about these scenes, if they allow one."""
    match task:
        case "number" | "word" | "shape":
            return ask.ask_item(rng, scenes, task)
        case "colour":
            return ask.ask_colour(rng, scenes)
        case "where":
            return ask.ask_where(rng, scenes)
        case "which":
            return ask.ask_which(rng, scenes)
        case "count":
            return ask.ask_count(rng, scenes)
        case "describe":
            return ask.ask_describe(rng, scenes)
        case "list":
            return ask.ask_list(rng, scenes)
        case _:
            return ask.ask_missing(rng, scenes)


def fill(batch: Batch, sizes: Sizes, table: GridTable, composer: Composer, level: float) -> int:
    """Fill a batch and replace part of the pool; returns the number of pictures in it."""
    packer = Packer(batch, sizes, table)
    while packer.add(composer.conversation(level)):
        pass
    packer.finish()
    composer.refill(level, int(packer.pictures / USES))
    return packer.pictures


class Feed:
    """Batches from `workers` processes through a ring of shared slots. Use as a context manager; `level` may change at any time."""

    def __init__(self, tokenizer_file: Path, sizes: Sizes, workers: int, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        template = empty_batch(sizes)
        nbytes = sum(array.nbytes for array in template.arrays().values())
        self.sizes = sizes
        self._memory = [SharedMemory(create=True, size=nbytes) for _ in range(2 * workers)]
        self._slots = [batch_in(memory, sizes) for memory in self._memory]
        self._free: Queue[int] = context.Queue()
        self._full: Queue[int] = context.Queue()
        self._level = context.Value("d", 0.0)
        for slot in range(len(self._memory)):
            self._free.put(slot)
        names = [memory.name for memory in self._memory]
        self._workers = []
        for i in range(workers):
            args = (names, sizes, str(tokenizer_file), (TRAINING_STREAM, seed, i), self._free, self._full, self._level)
            self._workers.append(context.Process(target=_work, args=args))

    def __enter__(self) -> "Feed":
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.terminate()
            worker.join()
        self._slots.clear()
        for memory in self._memory:
            memory.unlink()

    def set_level(self, level: float) -> None:
        """Difficulty of what is drawn from now on."""
        self._level.value = level

    def waiting(self) -> int:
        """Batches that are ready: zero means that drawing is the bottleneck."""
        return self._full.qsize()

    def take(self, timeout: float = 120.0) -> tuple[int, Batch]:
        """The next batch and its slot, which is to be given back with `release` once it was copied. queue.Empty if the workers died."""
        slot = self._full.get(timeout=timeout)
        return slot, self._slots[slot]

    def release(self, slot: int) -> None:
        """Let a worker fill the slot again."""
        self._free.put(slot)


def batch_in(memory: SharedMemory, sizes: Sizes) -> Batch:
    """The arrays of a batch laid out one after the other in shared memory."""
    arrays, at = {}, 0
    for name, like in empty_batch(sizes).arrays().items():
        arrays[name] = np.ndarray(like.shape, like.dtype, memory.buf, at)
        at += like.nbytes
    return Batch(**arrays)


def _work(
    names: list[str],
    sizes: Sizes,
    tokenizer_file: str,
    seed: tuple[int, ...],
    free: "Queue[int]",
    full: "Queue[int]",
    level: "Synchronized[float]",
) -> None:
    memory = [SharedMemory(name) for name in names]
    slots = [batch_in(item, sizes) for item in memory]
    composer = Composer(np.random.default_rng(seed), Encoder(Tokenizer.from_file(tokenizer_file)))
    table = GridTable()
    composer.refill(level.value, 200)
    while True:
        slot = free.get()
        fill(slots[slot], sizes, table, composer, level.value)
        full.put(slot)
