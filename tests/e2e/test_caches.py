"""Caches of images and prefixes on the demo model, by counting what is computed, encoded and decoded."""

from typing import Any

import pytest

from tests.e2e.serving import Counted, Engine, image_part, picture, text_part

pytestmark = pytest.mark.e2e

NUM_IMAGES = 8
BLOCK = 16
TURN_TOKENS = 49 + 16 + 24  # a picture, an answer, a question with its frame


def document(first_seed: int, count: int = NUM_IMAGES) -> list[dict[str, Any]]:
    return [image_part(picture(first_seed + i, 200, 200), "JPEG", quality=90) for i in range(count)]


def usage(engine: Engine, content: object, **fields: Any) -> dict[str, Any]:
    response = engine.chat(content, max_tokens=4, ignore_eos=True, **fields)
    assert response.status_code == 200, response.text
    used = response.json()["usage"]
    return used


@pytest.mark.gate
def test_a_conversation_computes_each_turn_once(demo: Engine) -> None:
    messages = []
    for turn, part in enumerate(document(0)):
        messages.append({"role": "user", "content": [part, text_part(f"What is in picture {turn + 1}?")]})
        with Counted(demo) as counted:
            response = demo.chat(None, messages=messages, max_tokens=16)
        used = response.json()["usage"]
        cached = used["prompt_tokens_details"]["cached_tokens"]
        assert counted.grown["images_encoded"] == 1 and counted.grown["images_decoded"] == 0
        assert counted.grown["images_skipped"] >= max(0, turn - 1)
        new_tokens = used["prompt_tokens"] - cached
        assert counted.grown["computed_tokens"] <= new_tokens + used["completion_tokens"] + 2
        assert new_tokens <= TURN_TOKENS + BLOCK
        messages.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})


@pytest.mark.gate
@pytest.mark.parametrize(("path", "is_encoded_again"), [("/reset_prefix_cache", False), ("/flush_cache", True)])
def test_flushed_caches_are_computed_again(demo: Engine, path: str, is_encoded_again: bool) -> None:
    content = [*document(400 + 2 * is_encoded_again, 2), text_part("What is in picture 1?")]
    usage(demo, content)
    assert usage(demo, content)["prompt_tokens_details"]["cached_tokens"] > 0
    with Counted(demo) as counted:
        answer = demo.client.post(path)
        assert answer.status_code == 200, answer.text
        assert usage(demo, content)["prompt_tokens_details"]["cached_tokens"] == 0
    assert counted.grown["images_encoded"] == 2 * is_encoded_again
