"""Drafts are lossless: each answer is that of an engine without drafts, with 16 concurrent streams."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from models.demo import CHECKPOINT
from tests.e2e.serving import Engine, chat_body, image_part, picture, serve, text_part
from tests.e2e.test_pressure import force_preemption

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "words": {"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 9}},
    "required": ["colour", "words"],
    "additionalProperties": False,
}
LONG: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
ANY: dict[str, Any] = {**LONG, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
SKY = "What colour is the sky?"
PICTURES = [image_part(picture(1, 96, 128)), image_part(picture(2, 64, 64))]
CASES: dict[str, tuple[object, dict[str, Any]]] = {
    "greedy": (SKY, LONG),
    "sampled": (SKY, ANY),
    "sampled, filtered": (SKY, {**ANY, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    "grammar": (SKY, {**ANY, "ignore_eos": False, "response_format": FORM}),
    "penalties": (SKY, {**LONG, "presence_penalty": 0.6, "frequency_penalty": 0.3}),
    "repetition": (SKY, {**ANY, "temperature": 0.6, "repetition_penalty": 1.1}),
    "logit_bias": (SKY, {**ANY, "logit_bias": {"100": 4, "101": 4, "102": -100}}),
    "min_tokens": (SKY, {"max_tokens": 48, "min_tokens": 30}),
    "bad words": (SKY, {**LONG, "bad_words": ["The sky", "blue"]}),
    "stop": (SKY, {**ANY, "stop": ["e ", "ing"], "min_tokens": 12}),
    "logprobs": (SKY, {**ANY, "temperature": 0.5, "logprobs": True, "top_logprobs": 2}),
    "n": (SKY, {**ANY, "temperature": 0.7, "n": 3}),
    "image": ([PICTURES[0], text_part("Describe the picture.")], LONG),
    "images, sampled": ([*PICTURES, text_part("Compare.")], {**ANY, "temperature": 0.5}),
    "prefix hit": ("This is a long beginning, which is asked about twice. " * 4 + "What is it?", {**LONG, "temperature": 0.4}),
    "thoughts": ("Count from one to twenty.", {**LONG, "temperature": 0.3}),
}
TIGHT = ["--num-gpu-blocks-override", "40", "--max-num-batched-tokens", "256"]


@pytest.fixture(params=[pytest.param("1", marks=pytest.mark.gate), "2"])
def drafting(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with drafts and few KV blocks, on one rank or two."""
    with serve(CHECKPOINT, *TIGHT, "--draft", "suffix", "--tp", request.param) as running:
        yield running


def ask(engine: Engine, name: str, prediction: str | None) -> list[Any]:
    content, fields = CASES[name]
    guess = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
    response = engine.chat(content, **fields, **guess, seed=7, cache_salt="ours")
    assert response.status_code == 200, response.text
    answer = response.json()
    choices = [(choice["message"]["content"], choice["finish_reason"], choice["logprobs"]) for choice in answer["choices"]]
    return [choices, answer["usage"]["completion_tokens"]]


def ask_all(engine: Engine, predictions: dict[str, str]) -> dict[str, list[Any]]:
    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(lambda name: ask(engine, name, predictions.get(name)), CASES), strict=True))


def without_logprobs(answers: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: [[choice[:2] for choice in choices], count] for name, (choices, count) in answers.items()}


def spoilt(text: str, rng: random.Random) -> str:
    """Replace some words."""
    return " ".join(word if rng.random() < 0.8 else "zebra" for word in text.split(" "))


def leave_early(engine: Engine) -> None:
    """Read the first line of a stream and close the connection."""
    body = chat_body("Count from one to twenty.", stream=True, **LONG)
    with engine.client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(line for line in response.iter_lines() if line)


def test_answers_are_those_without_drafts(demo: Engine, drafting: Engine) -> None:
    """Red if drafts change a text, a finish reason, a number of tokens or a log-probability: predictions that hold, that hold in part, or
    that belong to another question; with streams that clients leave, and with requests that are preempted."""
    plain = ask_all(demo, {})
    texts = {name: choices[0][0] for name, (choices, _) in plain.items()}
    others = dict(zip(texts, [*list(texts.values())[1:], ""], strict=True))
    rng = random.Random(0)
    rounds = [texts, {name: spoilt(text, rng) for name, text in texts.items()}, others, {}]
    force_preemption(drafting)
    with ThreadPoolExecutor(4) as pool:
        for predictions in rounds:
            left = [pool.submit(leave_early, drafting) for _ in range(4)]
            answers = ask_all(drafting, predictions)
            assert without_logprobs(answers) == without_logprobs(plain)
            for ours, theirs in zip(logprobs_of(answers), logprobs_of(plain), strict=True):
                assert ours["token"] == theirs["token"] and ours["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)
            for stream in left:
                stream.result()
    for name in CASES:
        assert without_logprobs({name: ask(drafting, name, texts[name])}) == without_logprobs({name: plain[name]})
    proposed, accepted = (drafting.metric(f"engine_{name}draft_tokens_total") for name in ("", "accepted_"))
    assert accepted > 50 and proposed - accepted > 10, (proposed, accepted)
    assert drafting.metric("engine_cached_prompt_tokens_total") > 0


def logprobs_of(answers: dict[str, list[Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answers["logprobs"][0][0][2]["content"]
    return found
