"""What a request says of its tokens, through all processes and the demo model: grammars, penalties, biases, log-probabilities."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from models.demo import CHECKPOINT
from tests.e2e.serving import Engine, serve

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TIGHT = ["--num-gpu-blocks-override", "24"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with serve(CHECKPOINT, *TIGHT) as running:
        yield running


def ask(engine: Engine, **fields: object) -> str:
    return engine.text("What colour is the sky?", max_tokens=40, **fields)


def test_answers_follow_a_schema_beside_free_ones(engine: Engine) -> None:
    """Red if a mask is lost or is another row's between real processes, also where requests are preempted, or if a free answer changes."""
    free = ask(engine, temperature=0)
    settings = [{"response_format": FORMAT, "temperature": 1.5, "seed": seed} for seed in range(8)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda fields: ask(engine, **fields), settings + [{"temperature": 0}] * 8))
    for answer in answers[:8]:
        value = json.loads(answer)
        assert value.keys() == {"colour", "sure"} and value["colour"] in ("red", "blue") and isinstance(value["sure"], bool)
    assert answers[8:] == [free] * 8
    assert [ask(engine, **fields) for fields in settings] == answers[:8]


def test_a_wrong_grammar_is_the_clients_error(engine: Engine) -> None:
    """Red if a schema that cannot be compiled is more than a 400, or harms the next request."""
    wrong = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "nonsense"}}}
    response = engine.chat("Hello", response_format=wrong)
    assert response.status_code == 400 and "nonsense" in response.json()["error"]["message"]
    assert json.loads(ask(engine, response_format=FORMAT))


def test_logprobs_are_reported(engine: Engine) -> None:
    """Red if what the worker reports does not reach the client, or is not of the raw logits: a bias must not show in it."""
    fields = {"temperature": 0, "logprobs": True, "top_logprobs": 3, "max_tokens": 6}
    plain = engine.chat("Hello", **fields).json()["choices"][0]["logprobs"]["content"]
    assert all(len(item["top_logprobs"]) == 3 and item["logprob"] == item["top_logprobs"][0]["logprob"] for item in plain)
    assert sum(math.exp(item["logprob"]) for item in plain[0]["top_logprobs"]) <= 1.001
    second = plain[0]["top_logprobs"][1]
    ids = engine.client.post("/tokenize", json={"prompt": second["token"], "add_special_tokens": False}).json()["tokens"]
    biased = engine.chat("Hello", **fields, logit_bias={str(ids[0]): 100}).json()["choices"][0]["logprobs"]["content"]
    assert len(ids) == 1 and biased[0]["token"] == second["token"] and biased[0]["logprob"] == pytest.approx(second["logprob"], abs=1e-4)


def test_the_rest_reaches_the_sampler(engine: Engine) -> None:
    """Red if a field is taken and forgotten."""
    free = ask(engine, temperature=0)
    assert ask(engine, temperature=0, presence_penalty=2, frequency_penalty=2, repetition_penalty=1.5, min_tokens=30) != free
    assert engine.chat("Hello", temperature=0, max_tokens=30, min_tokens=25).json()["usage"]["completion_tokens"] >= 25
    assert free.split()[0] not in ask(engine, temperature=0, bad_words=[free.split()[0]])
