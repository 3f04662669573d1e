"""A grammar's way through the real processor: compiled by its child, handed to the scheduler in the arena, refused where it is none."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xgrammar

from engine.grammar.vocabulary import read_vocabulary
from engine.ipc import Outbox
from engine.messages import (
    ChatPrompt,
    EngineRequest,
    GrammarLoaded,
    Region,
    RequestOutput,
    Stages,
    Submit,
    ToProcessor,
)
from engine.params import Grammar, OutputOptions, SamplingParams
from server.processor.grammar import LARGE_BYTES
from server.processor.intake import DEFAULT_JSON_TOKENS
from tests.unit.server.stack import FakeScheduler, Stack

MESSAGES = b'[{"role": "user", "content": "hi"}]'
FIRST_RID = 1 << 40  # none of the api's: it ignores what comes of these


@pytest.fixture(params=[False, True], ids=["plain", "thinking"])
def running(request: pytest.FixtureRequest, model_folder: Path, thinking_folder: Path) -> Iterator[tuple[Stack, Path]]:
    folder = thinking_folder if request.param else model_folder
    stack = Stack(folder, max_model_len=3 * DEFAULT_JSON_TOKENS)
    yield stack, folder
    stack.close()


def submit(stack: Stack, rid: int, grammar: Grammar | None) -> None:
    processor: Outbox[ToProcessor] = Outbox(stack.run_dir, "processor")
    processor.send(Submit(rid, ChatPrompt(MESSAGES), [], SamplingParams(), OutputOptions(), Stages(), grammar=grammar))
    processor.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_grammars_reach_the_scheduler(running: tuple[Stack, Path]) -> None:
    """Red if rank 0 could not read a grammar, if it holds before the thoughts end, if its region is lost or its child outlives it; or if
    JSON goes on to the end of the context, or a client's own limit is changed."""
    stack, folder = running
    shape = {"response_format": {"type": "json_object"}}
    for fields, limit in ((shape, DEFAULT_JSON_TOKENS), ({**shape, "max_tokens": 9000}, 9000), ({"regex": "a+"}, None)):
        assert stack.chat("x", **fields).status_code == 200
        is_bounded = limit is not None and (not folder.name.startswith("thinking") or "max_tokens" in fields)
        expected = limit if is_bounded else stack.scheduler.max_model_len - len(stack.scheduler.prompt(stack.scheduler.requests[-1]))
        assert stack.scheduler.requests[-1].params.max_tokens == expected
    stack.scheduler.requests.clear()
    found: list[bytes] = []

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        found.append(b"" if request.grammar is None else scheduler.bytes_at(Region(*region_of(request))))
        scheduler.send([RequestOutput(request.rid, [5], "stop", stages=Stages())], [request.rid])

    stack.scheduler.script = script
    stack.wait_until(lambda: len(children_of(stack.processes["processor"].pid)) == 1)  # before anybody asks
    for rid, grammar in enumerate((Grammar("regex", "[ab]+c"), Grammar("regex", "(["), None, Grammar("regex", "[ab]+c")), FIRST_RID):
        submit(stack, rid, grammar)
    stack.wait_until(lambda: len(found) == 3, seconds=60)
    requests = {request.rid - FIRST_RID: request for request in stack.scheduler.requests}
    assert requests.keys() == {0, 2, 3} and sum(not data for data in found) == 1
    vocabulary = read_vocabulary(folder)
    end = vocabulary.decoded_vocab.index(b"</think>")
    for rid in (0, 3):
        grammar = requests[rid].grammar
        assert grammar is not None and grammar.after == (end if folder.name.startswith("thinking") else None)
    for data in filter(None, found):
        matcher = xgrammar.GrammarMatcher(xgrammar.CompiledGrammar.deserialize_json(data.decode(), vocabulary))
        assert matcher.accept_string("abbac") and not matcher.accept_string("c")
    stack.settle()
    (compiler,) = children_of(stack.processes["processor"].pid)
    os.kill(stack.processes["processor"].pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{compiler}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{compiler}/stat").exists()


def test_a_large_grammar_is_read_before_there_is_a_plan(model_folder: Path) -> None:
    """Red if the step that admits its request, or the first grammar's, has to read it: streams of others stood still for a second."""
    stack = Stack(model_folder)
    processor: Outbox[ToProcessor] = Outbox(stack.run_dir, "processor")
    large = Grammar("json_schema", json.dumps({"properties": {f"k{i}": {"type": "string"} for i in range(60)}}))
    try:
        for rid, grammar in enumerate((Grammar("regex", "a"), Grammar("regex", "b"), large), FIRST_RID):
            stack.scheduler.reads_grammars = grammar is not large
            submit(stack, rid, grammar)
            stack.wait_until(lambda: len(stack.scheduler.requests) + len(stack.scheduler.loads) == (2, 3, 4)[rid - FIRST_RID], 60)  # noqa: B023
        load = stack.scheduler.loads[-1]
        assert len(stack.scheduler.requests) == 2 and load.region.length >= LARGE_BYTES
        processor.send(GrammarLoaded(load.ticket))
        stack.wait_until(lambda: len(stack.scheduler.requests) == 3)
        assert region_of(stack.scheduler.requests[-1])[1] == load.region.offset
    finally:
        processor.close()
        stack.close()


def region_of(request: EngineRequest) -> tuple[int, int, int]:
    assert request.grammar is not None
    region = request.grammar.region
    return region.arena, region.offset, region.length
