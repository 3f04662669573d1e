"""Parameters of sampling through all processes: grammars, penalties, biases, log-probabilities."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.serving import Engine

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def ask(engine: Engine, **fields: object) -> str:
    return engine.text("What colour is the sky?", max_tokens=40, **fields)


@pytest.mark.gate
def test_answers_follow_a_schema_among_free_ones(tight: Engine) -> None:
    free = ask(tight, temperature=0)
    settings = [{"response_format": FORMAT, "temperature": 1.5, "seed": seed} for seed in range(8)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda fields: ask(tight, **fields), settings + [{"temperature": 0}] * 8))
    for answer in answers[:8]:
        value = json.loads(answer)
        assert value.keys() == {"colour", "sure"} and value["colour"] in ("red", "blue") and isinstance(value["sure"], bool)
    assert answers[8:] == [free] * 8
    assert [ask(tight, **fields) for fields in settings] == answers[:8]


@pytest.mark.gate
def test_logprobs_are_reported(demo: Engine) -> None:
    fields = {"temperature": 0, "logprobs": True, "top_logprobs": 3, "max_tokens": 6}
    plain = demo.chat("Hello", **fields).json()["choices"][0]["logprobs"]["content"]
    assert all(len(item["top_logprobs"]) == 3 and item["logprob"] == item["top_logprobs"][0]["logprob"] for item in plain)
    assert sum(math.exp(item["logprob"]) for item in plain[0]["top_logprobs"]) <= 1.001
    second = plain[0]["top_logprobs"][1]
    ids = demo.client.post("/tokenize", json={"prompt": second["token"], "add_special_tokens": False}).json()["tokens"]
    biased = demo.chat("Hello", **fields, logit_bias={str(ids[0]): 100}).json()["choices"][0]["logprobs"]["content"]
    assert len(ids) == 1 and biased[0]["token"] == second["token"] and biased[0]["logprob"] == pytest.approx(second["logprob"], abs=1e-4)
