"""Answers that later requests name: through the real api, by OpenAI's own client, and their bounds alone."""

from typing import Any

import openai
import pytest

from server.api.responses import store as module
from server.api.responses.store import ResponseStore
from server.errors import RequestError
from tests.e2e.serving import data_uri, picture
from tests.unit.server.stack import Stack

ADDRESS = data_uri(picture(1, 400, 300))
PICTURE: dict[str, Any] = {"type": "input_image", "image_url": ADDRESS, "detail": "auto"}


@pytest.fixture(scope="module")
def client(running_stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running_stack.url}/v1", api_key="one", max_retries=0)


def question(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "input_text", "text": "data: what?"}, *parts]}]


def test_a_conversation_by_name_is_the_whole_one(stack: Stack, client: openai.OpenAI) -> None:
    """Red if what was said or shown before is missing, if a picture is another one, or if a stream is not kept as a document is."""
    first: Any = client.responses.create(model="test-model", input=question(PICTURE), instructions="be short")
    history = [*question(PICTURE), *(item.model_dump(exclude_none=True) for item in first.output), {"role": "user", "content": "and?"}]
    for is_streamed in (False, True):
        asked: dict[str, Any] = {"model": "test-model", "previous_response_id": first.id, "input": "and?"}
        if is_streamed:
            with client.responses.stream(**asked) as stream:
                answer: Any = stream.get_final_response()
        else:
            answer = client.responses.create(**asked)
        named = stack.scheduler.requests[-1]
        client.responses.create(model="test-model", input=history, store=False)
        whole = stack.scheduler.requests[-1]
        assert answer.previous_response_id == first.id and answer.store is True
        assert stack.scheduler.prompt(named) == stack.scheduler.prompt(whole)
        assert [(image.hash, image.start) for image in named.images] == [(image.hash, image.start) for image in whole.images] != []
        third: Any = client.responses.create(model="test-model", previous_response_id=answer.id, input=question(PICTURE))
        assert len(stack.scheduler.requests[-1].images) == 2 and third.usage.input_tokens > answer.usage.input_tokens
        assert client.responses.retrieve(answer.id).output_text == answer.output_text
    counted = client.responses.input_tokens.count(model="test-model", previous_response_id=first.id, input="and?")
    assert counted.input_tokens == len(stack.scheduler.prompt(named))
    shown: Any = client.responses.input_items.list(first.id).data[0]
    assert shown.content[1].image_url == ADDRESS


def test_what_is_not_stored_is_a_404(stack: Stack, client: openai.OpenAI) -> None:
    """Red if another key may read or go on with a conversation, or if what was deleted or never stored is another error than OpenAI's."""
    kept = client.responses.create(model="test-model", input="x").id
    unkept: Any = client.responses.create(model="test-model", input="x", store=False)
    assert unkept.store is False
    other = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="two", max_retries=0)
    for asker, name in ((client, unkept.id), (other, kept), (client, "resp_1")):
        with pytest.raises(openai.NotFoundError) as missing:
            asker.responses.create(model="test-model", input=question(PICTURE), previous_response_id=name)
        assert (missing.value.param, missing.value.code) == ("previous_response_id", "response_not_found")
        with pytest.raises(openai.NotFoundError):
            asker.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            asker.responses.delete(name)
    client.responses.delete(kept)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept)


def test_size_and_age_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if answers are kept beyond the memory or the time that there is for them, or if a large one drives itself and others out."""
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    store = ResponseStore(max_bytes=100, max_seconds=10)
    for name in "abc":
        store.put(name, b"me", b"d" * 20, b"i" * 10, b"o" * 10)
    assert [store.get(name, b"me").document for name in "bc"] == [b"d" * 20] * 2
    with pytest.raises(RequestError):
        store.get("a", b"me")
    now = 111.0
    with pytest.raises(RequestError):
        store.get("c", b"me")
    store.put("d", b"me", b"", b"i", b"")
    assert store.num_bytes == 1
    store.put("e", b"me", b"d" * 101, b"", b"")
    assert store.num_bytes == 1 and store.get("d", b"me")
