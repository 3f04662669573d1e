"""Embeddings and scores equal those of transformers, on a tiny model whose tokenizer ends a text as that of Qwen3-VL-Embedding does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from server.api.dialects.pooling import EMBED, JUDGE, RERANK
from tests.e2e.reference import Reference
from tests.e2e.serving import Engine, image_part, picture, text_part

pytestmark = pytest.mark.e2e

IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Reference:
    return Reference(tiny)


def embedded(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": EMBED}, {"role": "user", "content": text}]


def post(engine: Engine, path: str, **body: Any) -> Any:
    answer = engine.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def unit(hidden: torch.Tensor, size: int | None = None) -> np.ndarray[Any, Any]:
    part = hidden[:size].numpy()
    return part / np.linalg.norm(part)


@pytest.mark.gate
def test_embeddings_of_texts(tiny_engine: Engine, reference: Reference) -> None:
    texts = ["What is this?", "Something else, much longer. " * 20, "What is this?"]
    found = post(tiny_engine, "/v1/embeddings", input=texts)
    assert [entry["index"] for entry in found["data"]] == [0, 1, 2] and found["usage"]["prompt_tokens"] > 300
    for text, entry in zip(texts, found["data"], strict=True):
        expected = unit(reference.last_hidden(embedded(text), [], is_framed=True))
        np.testing.assert_allclose(entry["embedding"], expected, atol=2e-5)
    ids = tiny_engine.client.post("/tokenize", json={"prompt": "a"}).json()["tokens"]
    assert len(post(tiny_engine, "/v1/embeddings", input=[ids, ids], encoding_format="base64")["data"]) == 2
    bare = unit(reference.last_hidden(embedded(texts[0]), [], is_framed=False))
    assert np.abs(bare - np.asarray(found["data"][0]["embedding"])).max() > 1e-3, "the test cannot tell the tokens apart"


@pytest.mark.gate
def test_embeddings_of_messages_with_images(tiny_engine: Engine, reference: Reference) -> None:
    images = [picture(1, 96, 160), picture(2, 64, 64)]
    parts = [*(image_part(image) for image in images), text_part("Which one?")]
    found = post(tiny_engine, "/v1/embeddings", messages=[{"role": "user", "content": parts}], dimensions=64, instruction="Find the cat")
    messages = [{"role": "system", "content": "Find the cat."}, {"role": "user", "content": [IMAGE, IMAGE, text_part("Which one?")]}]
    expected = unit(reference.last_hidden(messages, images, is_framed=True), 64)
    np.testing.assert_allclose(found["data"][0]["embedding"], expected, atol=2e-5)
    assert len(found["data"][0]["embedding"]) == 64


def asked_of(reference: Reference, query: list[Any], document: list[Any], images: list[Any], instruction: str = RERANK) -> float:
    content = [text_part(f"<Instruct>: {instruction}"), text_part("<Query>:"), *query, text_part("\n<Document>:"), *document]
    messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": content}]
    yes, no = reference.logits_of_words(messages, images, ["yes", "no"])
    return float(1 / (1 + np.exp(no - yes)))


@pytest.mark.gate
def test_scores(tiny_engine: Engine, reference: Reference) -> None:
    image = picture(4, 70, 130)
    documents = ["Cats are animals.", {"content": [image_part(image), text_part("A picture.")]}, ""]
    expected = [
        asked_of(reference, [text_part("cats")], [text_part("Cats are animals.")], []),
        asked_of(reference, [text_part("cats")], [IMAGE, text_part("A picture.")], [image]),
        asked_of(reference, [text_part("cats")], [text_part("NULL")], []),
    ]
    ranked = post(tiny_engine, "/rerank", query="cats", documents=documents)["results"]
    by_index = {result["index"]: result["relevance_score"] for result in ranked}
    np.testing.assert_allclose([by_index[i] for i in range(3)], expected, atol=1e-5)
    assert [result["relevance_score"] for result in ranked] == sorted(by_index.values(), reverse=True)
    assert max(expected) - min(expected) > 1e-3
    assert len(post(tiny_engine, "/v1/rerank", query="cats", documents=documents, top_n=1)["results"]) == 1
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        scored = post(tiny_engine, "/score", **{first: "cats", second: documents})["data"]
        np.testing.assert_allclose([entry["score"] for entry in scored], expected, atol=1e-5)
    other = post(tiny_engine, "/score", text_1=[{"content": [image_part(image)]}], text_2="A picture.", instruction="Is it this one?")
    single = asked_of(reference, [IMAGE], [text_part("A picture.")], [image], "Is it this one?")
    assert other["data"][0]["score"] == pytest.approx(single, abs=1e-5)


def test_bad_requests(tiny_engine: Engine) -> None:
    message = {"role": "user", "content": "x"}
    cases = [
        ("/v1/embeddings", {}, "input"), ("/v1/embeddings", {"input": "x", "messages": [message]}, "input"),
        ("/v1/embeddings", {"input": []}, "input"), ("/v1/embeddings", {"input": "x", "dimensions": 129}, "dimensions"),
        ("/v1/embeddings", {"input": [5, 4096]}, "input"), ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ("/rerank", {"query": "x", "documents": []}, "documents"), ("/score", {"text_1": ["a", "b"], "text_2": "x"}, "text_1"),
    ]  # fmt: skip
    for path, body, param in cases:
        answer = tiny_engine.client.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, (path, body, answer.text)
