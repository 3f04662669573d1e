"""A text model behind the API: its answers are transformers' own, and images and videos are refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.e2e.serving import data_uri, image_part, picture, serve, text_part
from tests.unit.models.text_checkpoints import BOS_ID, write

pytestmark = pytest.mark.e2e


@torch.inference_mode()
def test_llama(tmp_path: Path) -> None:
    theirs = write(tmp_path, "llama3, tied")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    question = "What is left of it? " * 30 + "\nAnd why?"
    parts = [text_part(line) for line in question.splitlines()]
    asked = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)

    def said(ids: list[int]) -> str:
        told = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=16, min_new_tokens=16, eos_token_id=None)[0, len(ids) :]
        return str(tokenizer.decode(told, skip_special_tokens=True))

    plain = tokenizer.encode(question, add_special_tokens=False)
    expected = said(tokenizer.encode(asked, add_special_tokens=False))
    video = {"type": "video", "video": [data_uri(picture(i, 70, 110)) for i in range(4)]}
    with serve(tmp_path, "--image-cache-bytes", "64M") as engine:
        for asking in (question, parts):  # fresh, and from the prefix cache; Qwen's template would write parts without a line's end
            assert engine.text(asking, max_tokens=16, ignore_eos=True) == expected
        body = {"prompt": question, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        completed = engine.client.post("/v1/completions", json=body).json()
        assert completed["usage"]["prompt_tokens"] == len(plain) + 1, "the tokenizer puts a token before a text"
        assert completed["choices"][0]["text"] == said([BOS_ID, *plain])
        for part in (image_part(picture(1, 64, 64)), image_part(picture(2, 64, 64), "JPEG"), video):
            response = engine.chat([part])
            assert response.status_code == 400, response.text
            assert "this model does not support images" in response.json()["error"]["message"]
        assert engine.text(question, max_tokens=16, ignore_eos=True) == expected
