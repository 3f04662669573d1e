"""Drafts are lossless in the whole engine: each answer is that of an engine without drafts, with concurrent streams.

`tests/unit/worker/test_drafts.py` shows it for each sampling parameter, and `tests/unit/scheduler` for each load.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from models.demo import CHECKPOINT
from tests.e2e.serving import Engine, image_part, picture, serve, text_part
from tests.e2e.test_pressure import force_preemption
from tests.unit.models.eagle3_checkpoints import Eagle3

pytestmark = pytest.mark.e2e

WORDS = {"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 9}
SCHEMA = {"type": "object", "properties": {"words": WORDS}, "required": ["words"]}
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
ANY: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
SKY = "What colour is the sky?"
CASES: dict[str, tuple[object, dict[str, Any]]] = {
    "sampled": (SKY, ANY),
    "grammar": (SKY, {**ANY, "ignore_eos": False, "response_format": FORM}),
    "penalties": (SKY, {**ANY, "temperature": 0.0, "presence_penalty": 0.6, "repetition_penalty": 1.1}),
    "stop": (SKY, {**ANY, "stop": ["e ", "ing"], "min_tokens": 12}),
    "n": (SKY, {**ANY, "n": 3, "logprobs": True}),
    "image": ([image_part(picture(1, 96, 128)), text_part("Describe the picture.")], {**ANY, "temperature": 0.5}),
}
BLOCK_BYTES = 163_840  # of all ranks


@pytest.fixture(params=[pytest.param("1", marks=pytest.mark.gate), "2"])
def drafting(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with drafts and few KV blocks, on one rank or two."""
    tight = ["--kv-cache-memory-bytes", str(40 * BLOCK_BYTES // int(request.param)), "--max-num-batched-tokens", "256"]
    with serve(CHECKPOINT, *tight, "--draft", "lookup", "--tp", request.param) as running:
        yield running


def ask(engine: Engine, name: str) -> list[Any]:
    content, fields = CASES[name]
    response = engine.chat(content, **fields, seed=7)
    assert response.status_code == 200, response.text
    answer = response.json()
    return [[(choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]], answer["usage"]["completion_tokens"]]


def ask_all(engine: Engine) -> dict[str, list[Any]]:
    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(lambda name: ask(engine, name), CASES), strict=True))


def test_answers_are_those_without_drafts(demo: Engine, drafting: Engine) -> None:
    plain = ask_all(demo)
    force_preemption(drafting)
    assert ask_all(drafting) == ask_all(drafting) == plain
    for name in CASES:
        assert ask(drafting, name) == plain[name]
    proposed, accepted = (drafting.metric(f"vllm:spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted"))
    assert accepted > 50 and proposed - accepted > 10, (proposed, accepted)
    assert drafting.metric("vllm:prefix_cache_hits_total") > 0


def test_a_head_of_another_checkpoint_changes_no_answer(demo: Engine, tmp_path: Path) -> None:
    Eagle3(AutoConfig.from_pretrained(CHECKPOINT).text_config, is_nested=False).save(tmp_path / "head")
    with serve(CHECKPOINT, "--tp", "2", "--draft", "eagle3", "--draft-model", str(tmp_path / "head")) as drafting:
        for _ in range(2):
            assert ask_all(drafting) == ask_all(demo)
        assert drafting.metric("vllm:spec_decode_num_draft_tokens_total") > 0
