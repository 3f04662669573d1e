"""What `LLM.chat` sends and refuses."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.llm.bodies import CHAT, SamplingParams, body_of, listed

QUESTION = "What is in it?"


def content_of(*parts: Any) -> list[dict[str, Any]]:
    body = body_of(CHAT, [{"role": "user", "content": list(parts)}], SamplingParams(), {})
    content: list[dict[str, Any]] = body["messages"][0]["content"]
    return content


def test_parts_are_pictures_by_their_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a text that names a file is read: only a `Path` and the `image` of a dictionary are paths."""
    monkeypatch.setenv("HOME", str(tmp_path))
    Image.new("RGB", (4, 4)).save(path := tmp_path / "a picture.png")
    for part in (path, Path("~/a picture.png"), path.read_bytes(), {"type": "image", "image": str(path)}):
        picture, question = content_of(part, QUESTION)
        assert picture["type"] == "image" and picture["image"].startswith("data:") and question == {"type": "text", "text": QUESTION}
    url = "HTTP://example.com/a"
    for part in ({"type": "image", "image": url}, {"type": "image_url", "image_url": url}):
        assert content_of(part) == [part]
    texts = [str(path), url, "missing.jpg", ""]
    assert [part["text"] for part in content_of(*texts)] == texts
    with pytest.raises(FileNotFoundError, match="missing"):
        content_of(Path("missing.jpg"))


def test_sampling_params_and_fields_are_sent() -> None:
    body = body_of(CHAT, QUESTION, SamplingParams(temperature=0, logprobs=2), {"top_a": 1})
    del body["messages"]
    assert body == {"return_token_ids": True, "temperature": 0, "logprobs": True, "top_logprobs": 2, "top_a": 1}


def test_text_is_a_conversation() -> None:
    assert listed(QUESTION) == [QUESTION] and listed([QUESTION, QUESTION]) == [QUESTION, QUESTION]
    assert body_of(CHAT, QUESTION, None, {})["messages"] == [{"role": "user", "content": QUESTION}]


def test_an_adapter_is_the_model_of_a_request() -> None:
    assert body_of(CHAT, QUESTION, None, {"lora": "mine"})["model"] == "mine"
    assert "model" not in body_of(CHAT, QUESTION, None, {"lora": None})
