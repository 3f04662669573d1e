"""Anthropic's dialect through the real api and processor: what stands in the body of a request reaches the model whole."""

import base64
import os
from typing import Any

import numpy as np
import pytest
from PIL import Image

from server.http.body import MAX_TEXT_BYTES
from tests.unit.server.pictures import save
from tests.unit.server.stack import Stack


@pytest.mark.parametrize("num_bytes", [100, 900])
def test_a_text_that_looks_like_an_image_is_put_back(stack: Stack, num_bytes: int) -> None:
    data = base64.b64encode(os.urandom(num_bytes)).decode()
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"data": data}}
    history: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [call]}, {"role": "user", "content": "y"}]
    counted = stack.http.post("/v1/messages/count_tokens", json={"model": "test-model", "messages": history})
    told = {"type": "function", "function": {"name": "f", "arguments": {"data": data}}}
    chat = [history[0], {"role": "assistant", "content": "", "tool_calls": [told]}, history[2]]
    assert counted.json() == {"input_tokens": stack.http.post("/tokenize", json={"messages": chat}).json()["count"]}


def test_a_large_image_is_no_text(stack: Stack) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1300, 1900, 3), dtype=np.uint8)
    data = base64.b64encode(save(Image.fromarray(noise), "PNG")).decode()
    assert len(data) > MAX_TEXT_BYTES
    image = {"type": "image", "source": {"data": data, "type": "base64", "media_type": "image/png"}}
    body = {"model": "test-model", "max_tokens": 3, "messages": [{"role": "user", "content": [image]}]}
    answer = stack.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 2000
    refused = stack.http.post("/v1/messages", json={**body, "messages": [{"role": "user", "content": data}]})
    assert refused.status_code == 413 and refused.json()["error"]["type"] == "request_too_large"
