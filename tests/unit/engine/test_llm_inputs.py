"""What `LLM.chat` sends and refuses."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.llm.inputs import CHAT, Ask, SamplingParams, listed

QUESTION = "What is in it?"


def content_of(*parts: Any) -> list[dict[str, Any]]:
    value = Ask(CHAT, [{"role": "user", "content": list(parts)}], SamplingParams(), {}).body()
    content = value["messages"][0]["content"]
    return content


def test_paths_and_urls_among_the_parts_are_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent as text, a name would be all that the model sees."""
    names = ("a picture.png", "PICTURE.JPG", "sub/no_suffix")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name, "PNG")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (*names, str(tmp_path / names[0]), f"~/{names[0]}", tmp_path / names[0]):
        picture, question = content_of(name, QUESTION)
        assert picture["image_url"].startswith("data:"), name
        assert question == {"type": "text", "text": QUESTION}
    for url in ("https://example.com/a.jpg", "HTTP://example.com/a", "file:///a.png", "data:image/png;base64,AAAA"):
        assert content_of(url, QUESTION)[0] == {"type": "image_url", "image_url": url}


def test_picture_that_does_not_exist_raises() -> None:
    for name in ("missing.jpg", "/no/such/folder/Missing.PNG", "a missing one.webp"):
        with pytest.raises(FileNotFoundError, match="there is no image file"):
            content_of(name, QUESTION)


def test_texts_among_the_parts_stay_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "word").write_text("a file that is called like a word")
    texts = ["word", "yes/no", "Is it 3.5?", "https://example.com/a.jpg is where it is from", "data: one, two", "", "x" * 100_000, "a\0b"]
    assert [part["text"] for part in content_of(*texts)] == texts
    assert content_of({"type": "text", "text": "missing.jpg"}) == [{"type": "text", "text": "missing.jpg"}]


def test_sampling_params_have_known_names() -> None:
    params = SamplingParams(temperature=0, logprobs=2, extra={"top_a": 1})
    assert params.seed is None and params.as_fields(True) == {
        "return_token_ids": True, "temperature": 0, "logprobs": True, "top_logprobs": 2, "top_a": 1,
    }  # fmt: skip
    with pytest.raises(TypeError, match="has no temprature"):
        SamplingParams(temprature=0)


def test_text_is_a_conversation() -> None:
    assert listed(QUESTION) == [QUESTION] and listed([QUESTION, QUESTION]) == [QUESTION, QUESTION]
    assert Ask(CHAT, QUESTION, SamplingParams(), {}).body()["messages"] == [{"role": "user", "content": QUESTION}]
    for wrong in (7, [], [QUESTION], [{"content": QUESTION}], {"role": "user"}):
        with pytest.raises(ValueError, match="a conversation must be a string or a list of messages"):
            Ask(CHAT, wrong, SamplingParams(), {}).body()


def test_an_adapter_is_the_model_of_a_request() -> None:
    assert Ask(CHAT, QUESTION, SamplingParams(), {"lora": "mine"}).body()["model"] == "mine"
    assert "model" not in Ask(CHAT, QUESTION, SamplingParams(), {"lora": None}).body()
