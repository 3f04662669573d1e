"""Answers with a grammar through all processes."""

import json
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
