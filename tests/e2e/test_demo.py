"""Answers of the demo model over HTTP, in float32 on a CPU, are those of transformers.

`reference_answers.json` has those of `generate` to two hundred questions, wrong ones included, however steps are cut,
shared between ranks, batched or cached.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from bench.accuracy import Result, ask_server
from bench.client import ChatClient
from models.demo import CHECKPOINT
from models.demo.questions import Question, question
from tests.e2e.serving import Counted, Engine

pytestmark = pytest.mark.e2e

AT_ONCE = 16


@dataclass(frozen=True)
class Recorded:
    question: Question
    said: str


@pytest.fixture(scope="module")
def recorded() -> list[Recorded]:
    records = json.loads((CHECKPOINT.parent / "reference_answers.json").read_text())
    assert len(records) >= 200
    return [Recorded(question(record["seed"], record["task"]), record["said"]) for record in records]


def ask(engine: Engine, items: Sequence[Question], at_once: int) -> list[Result]:
    async def run() -> list[Result]:
        async with ChatClient(engine.url) as client:
            return await ask_server(client, "", items, at_once)

    return asyncio.run(run())


def assert_same(engine: Engine, records: Sequence[Recorded], at_once: int) -> None:
    results = ask(engine, [record.question for record in records], at_once)
    different = {
        f"{result.task} {result.seed}": (result.error or result.said, record.said)
        for result, record in zip(results, records, strict=True)
        if result.error or result.said != record.said
    }
    assert not different, f"(engine, transformers): {different}"


@pytest.mark.parametrize("in_gate", [pytest.param(True, marks=pytest.mark.gate), False])
def test_answers_in_whole_prompts_fresh_and_cached(demo: Engine, recorded: list[Recorded], in_gate: bool) -> None:
    records = [record for i, record in enumerate(recorded) if (i % 4 == 0) == in_gate]
    assert_same(demo, records, AT_ONCE)
    with Counted(demo) as counted:
        assert_same(demo, records, AT_ONCE)
    assert counted.grown["images_encoded"] == 0


@pytest.mark.gate
def test_chunks_and_ranks_change_no_answer(chunked: Engine, recorded: list[Recorded]) -> None:
    assert_same(chunked, recorded[5::36], 1)
    assert_same(chunked, recorded[4::9], AT_ONCE)
    assert_same(chunked, recorded[4::36], 1)
