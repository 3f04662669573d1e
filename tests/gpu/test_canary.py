"""The demo model on a GPU, asked five hundred questions with pictures of all sizes mixed: every answer is that of transformers."""

import asyncio
import json
import random

import pytest
import torch

from bench.accuracy import ask_server
from bench.client import ChatClient
from models.demo import CHECKPOINT
from models.demo.questions import question
from tests.e2e.serving import Engine, serve

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]

NUM_ASKED = 500
AT_ONCE = 16
MIN_MARGIN = 2.0  # logits: what transformers was less sure of, bfloat16 may read otherwise (one question in two hundred; the next has 5)


def test_five_hundred_answers_with_mixed_sizes(request: pytest.FixtureRequest) -> None:
    records = [
        record for record in json.loads((CHECKPOINT.parent / "reference_answers.json").read_text()) if record["margin"] >= MIN_MARGIN
    ]
    assert len(records) >= 200
    chosen = [record for _ in range(3) for record in random.Random(0).sample(records, len(records))][:NUM_ASKED]
    items = [question(record["seed"], record["task"]) for record in chosen]

    async def ask(engine: Engine) -> list[str]:
        async with ChatClient(engine.url) as client:
            return [result.error or result.said for result in await ask_server(client, "", items, AT_ONCE)]

    sizes = ["--kv-cache-memory-bytes", "2G", "--image-cache-bytes", "4M"]
    flags = ["--backend", request.config.getoption("--backend"), *sizes]
    with serve(CHECKPOINT, *flags) as engine:
        said = asyncio.run(ask(engine))
    different = [(answer, record["said"]) for answer, record in zip(said, chosen, strict=True) if answer != record["said"]]
    assert len(said) == NUM_ASKED and not different
