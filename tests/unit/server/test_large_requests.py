"""Requests of a few megabytes that are made to cost seconds: what others wait meanwhile, and what they take of the memory."""

import json
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from server.errors import RequestError
from server.http.validate import MAX_VALUES, read_object
from tests.unit.server.stack import MIB, Stack

MESSAGES = b'{"messages": [{"role": "user", "content": "x"}], "ignored": %s}'
COSTLY = {
    "empty lists": b"[" + b"[]," * (7 * MIB // 3) + b"0]",
    "nested lists": b"[" + b",".join([b"[" * 100 + b"]" * 100] * (7 * MIB // 201)) + b"]",
    "objects": b"[" + b'{"a":{}},' * (7 * MIB // 9) + b"0]",
    "members": b"{" + b",".join(b'"%x":0' % i for i in range(800_000)) + b"}",
}


@pytest.fixture
def stack(process_stack: Stack) -> Stack:
    return process_stack


@pytest.mark.parametrize("name", COSTLY)
def test_values_without_number_are_refused_before_they_are_made(stack: Stack, name: str) -> None:
    """Red if a field that nobody reads keeps everybody waiting while Python makes millions of objects of it."""
    statuses: list[int] = []

    def send() -> None:
        with httpx.Client(base_url=stack.url, timeout=60, headers={"Content-Type": "application/json"}) as client:
            statuses.append(client.post("/v1/chat/completions", content=MESSAGES % COSTLY[name]).status_code)

    assert stack.keeps_answering(send)
    assert {*statuses} == {413}


def test_brackets_and_colons_in_texts_are_text() -> None:
    """Red if a program or a table in a message counts as lists."""
    text = '[{":\\"' * MAX_VALUES
    value = read_object(json.dumps({"content": text, "more": ["[", '"[', "\\"] * 9000}).encode())
    assert value["content"] == text
    with pytest.raises(RequestError) as caught:
        read_object(json.dumps({"content": text, "more": [[]] * MAX_VALUES}).encode())
    assert caught.value.info.status == 413


def test_the_largest_requests_that_are_meant_are_read(stack: Stack) -> None:
    """Red if ten thousand messages in parts, or a thousand tools, are taken for an attack."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_object(json.dumps({"messages": [{"role": "user", "content": parts}] * 10_000}).encode())
    properties = {f"p{i}": {"type": "string", "description": "x"} for i in range(15)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    assert read_object(json.dumps({"tools": [tool] * 1024}).encode())


def test_what_clients_wrote_is_not_kept() -> None:
    """Red if the parser remembers short strings of requests: megabytes of them, for ever."""
    read_object(b'{"content": "warm"}')
    tracemalloc.start()
    for i in range(2000):
        read_object(json.dumps({"content": f"a short text {i}"}).encode())
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 20_000


def peak_memory(pid: int) -> int:
    """Bytes that a process has had at most."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def test_a_prompt_that_never_fits_costs_no_more_than_one_that_does(model_folder: Path) -> None:
    """Red if megabytes of text become tokens first and are refused then: each took half a gigabyte and a second. Or if what is refused
    waits for the garbage collector: a gigabyte after a hundred."""
    stack = Stack(model_folder, api_arena_bytes=128 * MIB)
    try:
        stack.chat("hello")
        pid = stack.processes["processor"].pid
        before, started = peak_memory(pid), time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda i: stack.chat(f"{i} " + "word " * 1_500_000), range(64)))
        assert {answer.json()["error"]["code"] for answer in answers} == {"context_length_exceeded"}
        assert "more than 4096 tokens" in answers[0].json()["error"]["message"]
        assert time.monotonic() - started < 60
        assert peak_memory(pid) - before < 500 * MIB
        assert stack.http.post("/tokenize", json={"prompt": "word " * 100_000}).json()["count"] >= 100_000
    finally:
        stack.close()
