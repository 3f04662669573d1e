"""An answer with a grammar that the limit of tokens cut off says so in `warnings`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.messages import EngineRequest, RequestOutput, Stages
from server.http.reply import CUT_OFF
from tests.unit.server.stack import FakeScheduler, Stack

SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}}
TEXT = {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}}}


@pytest.fixture
def stack(model_folder: Path) -> Iterator[Stack]:
    running = Stack(model_folder)
    yield running
    running.close()


def test_cut_answer_with_a_grammar_has_a_warning(stack: Stack) -> None:
    """Red if a client takes half a JSON document for a whole one, or if an answer without a grammar has the warning."""

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        reason = "length" if request.params.max_tokens == 1 else "stop"
        scheduler.send([RequestOutput(request.rid, [5], reason, stages=Stages())], [request.rid])

    stack.scheduler.script = script
    for fields, limit, expected in ((SCHEMA, 1, [CUT_OFF]), (SCHEMA, 2, None), ({}, 1, None)):
        assert stack.chat("x", max_tokens=limit, **fields).json().get("warnings") == expected, (fields, limit)
        for usage in (False, True):
            answer = stack.chat("x", max_tokens=limit, stream=True, stream_options={"include_usage": usage}, **fields)
            chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert chunks[-1].get("warnings") == expected and not any("warnings" in chunk for chunk in chunks[:-1])
    answer = stack.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1, **TEXT}).json()
    assert answer["warnings"] == [CUT_OFF] and answer["status"] == "incomplete"
