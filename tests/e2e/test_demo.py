"""Real questions with right and wrong answers, asked of the whole engine over HTTP: the demo checkpoint in float32 on a CPU.

`reference_answers.json` holds what transformers' `generate` says to two hundred questions; the engine must say the same, wrong answers
included, however its steps are cut, shared between ranks, batched or cached.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import pytest

from bench.accuracy import DEFAULT_TASKS, Result, ask_server
from bench.client import ChatClient
from models.demo import CHECKPOINT
from models.demo.questions import Question, question, questions
from tests.e2e.serving import Engine, serve

pytestmark = pytest.mark.e2e

AT_ONCE = 16
FRESH_SEED = 20_000_001  # neither recorded nor used by the unit tests


@dataclass(frozen=True)
class Recorded:
    """A question and the greedy answer of transformers."""

    question: Question
    said: str


@pytest.fixture(scope="module")
def recorded() -> list[Recorded]:
    records = json.loads((CHECKPOINT.parent / "reference_answers.json").read_text())
    assert len(records) >= 200
    return [Recorded(question(record["seed"], record["task"]), record["said"]) for record in records]


def ask(engine: Engine, items: Sequence[Question], at_once: int) -> list[Result]:
    """All the questions, at most `at_once` in flight."""

    async def run() -> list[Result]:
        async with ChatClient(engine.url) as client:
            return await ask_server(client, "", items, at_once)

    return asyncio.run(run())


def assert_same(engine: Engine, records: Sequence[Recorded], at_once: int) -> None:
    """The engine says what transformers says, to the letter."""
    results = ask(engine, [record.question for record in records], at_once)
    different = {
        f"{result.task} {result.seed}": (result.error or result.said, record.said)
        for result, record in zip(results, records, strict=True)
        if result.error or result.said != record.said
    }
    assert not different, f"(engine, transformers): {different}"


def flags(chunk: int, tp: int) -> list[str]:
    steps = ["--max-num-batched-tokens", str(chunk), "--max-num-mixed-tokens", str(chunk), "--max-num-seqs", "16"]
    return [*steps, "--tp", str(tp), "--dtype", "float32", "--kv-cache-memory-bytes", "512M"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Of whole prompts, on one rank."""
    with serve(CHECKPOINT, *flags(8192, 1)) as running:
        yield running


def test_all_answers_in_whole_prompts_fresh_and_cached(engine: Engine, recorded: list[Recorded]) -> None:
    """Red if any stage differs from transformers, if rows of a batch leak into each other, or a cache holds what it should not."""
    assert_same(engine, recorded, AT_ONCE)
    encoded = engine.metric("engine_images_encoded_total")
    assert_same(engine, recorded, AT_ONCE)
    assert engine.metric("engine_images_encoded_total") == encoded, "an image was encoded again"


def test_fresh_questions_are_answered_rightly(engine: Engine) -> None:
    """Red if answers over the API become worse than the checkpoint is: it gets 98 to 100 % of these right."""
    results = ask(engine, list(islice(questions(FRESH_SEED, DEFAULT_TASKS), 60)), AT_ONCE)
    wrong = [result for result in results if not result.right]
    assert len(wrong) <= 3, wrong


@pytest.mark.parametrize(
    ("chunk", "tp", "first"),
    [(64, 1, 0), (8192, 2, 2), (64, 2, 4)],
)
def test_chunks_and_ranks_change_no_answer(recorded: list[Recorded], chunk: int, tp: int, first: int) -> None:
    """Red if a chunk boundary shifts a position or an image row, or if ranks disagree. Questions alone, batched and cached, each time
    others, half of all together."""
    with serve(CHECKPOINT, *flags(chunk, tp)) as engine:
        assert_same(engine, recorded[first + 1 :: 18], 1)
        assert_same(engine, recorded[first::6], AT_ONCE)
        assert_same(engine, recorded[first::18], 1)
