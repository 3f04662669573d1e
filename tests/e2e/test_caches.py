"""Caches of images and prefixes, by counting: multi-turn, repeated and shared images on the demo model, and tenants that must not share."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.serving import Counted, Engine, image_part, picture, serve, text_part

pytestmark = pytest.mark.e2e

NUM_IMAGES = 8
NUM_PAGES = 16
BLOCK = 16
QUESTION_TOKENS = 24
TURN_TOKENS = 49 + 16 + QUESTION_TOKENS  # a picture, an answer, a question with its frame


@pytest.fixture(scope="module")
def forgetful() -> Iterator[Engine]:
    """The demo model with space for two pictures."""
    with serve("demo", "--image-cache-bytes", "300K") as running:
        yield running


def document(first_seed: int, count: int = NUM_IMAGES) -> list[dict[str, Any]]:
    return [image_part(picture(first_seed + i, 200, 200), "JPEG", quality=90) for i in range(count)]


def screenshots(first_seed: int, count: int = NUM_IMAGES) -> list[dict[str, Any]]:
    """Images that only the processor can decode."""
    return [image_part(picture(first_seed + i, 200, 200)) for i in range(count)]


def usage(engine: Engine, content: object, **fields: Any) -> dict[str, Any]:
    response = engine.chat(content, max_tokens=4, ignore_eos=True, **fields)
    assert response.status_code == 200, response.text
    used: dict[str, Any] = response.json()["usage"]
    return used


@pytest.mark.parametrize("are_files", [pytest.param(False, marks=pytest.mark.gate), True])
def test_a_conversation_computes_each_turn_once(demo: Engine, are_files: bool) -> None:
    """Red if a turn decodes or encodes an old image again, or computes more than its own tokens and a block."""
    messages: list[dict[str, Any]] = []
    for turn, part in enumerate((screenshots if are_files else document)(0)):
        messages.append({"role": "user", "content": [part, text_part(f"What is in picture {turn + 1}?")]})
        with Counted(demo) as counted:
            response = demo.chat(None, messages=messages, max_tokens=16)
        used = response.json()["usage"]
        cached = used["prompt_tokens_details"]["cached_tokens"]
        assert counted.grown["images_encoded"] == 1 and counted.grown["images_decoded"] == are_files
        assert counted.grown["images_skipped"] >= max(0, turn - 1)
        new_tokens = used["prompt_tokens"] - cached
        assert counted.grown["computed_tokens"] <= new_tokens + used["completion_tokens"] + 2
        assert new_tokens <= TURN_TOKENS + BLOCK
        messages.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})


@pytest.mark.gate
def test_the_same_request_again_computes_less_than_a_block_and_no_image(demo: Engine) -> None:
    """Red if a repeated request encodes, or computes more than its last block."""
    content = [*document(20), text_part("List the numbers.")]
    first = usage(demo, content)
    with Counted(demo) as counted:
        second = usage(demo, content)
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens"] - cached <= BLOCK
    assert counted.grown["images_encoded"] == 0 and counted.grown["images_skipped"] == NUM_IMAGES
    assert counted.grown["computed_tokens"] <= BLOCK + 4 + 2


def test_a_shared_document_is_computed_once() -> None:
    """Red if questions about one document encode a picture twice, or compute the document again: once it is there, or while it is computed.

    Short steps, so that the first eight are there before the document is computed; each tenant has to compute it anew, with equal answers.
    """
    pages = document(40, NUM_PAGES)
    questions = [[*pages, text_part(f"Question {i}: how many pictures are there?")] for i in range(24)]
    with serve("demo", "--max-num-batched-tokens", "128") as engine:
        with Counted(engine) as counted, ThreadPoolExecutor(8) as pool:
            replies = [response.json() for response in pool.map(engine.chat, questions)]
        fresh = [engine.text(question, cache_salt=str(i)) for i, question in enumerate(questions[::8])]
    assert [reply["choices"][0]["message"]["content"] for reply in replies[::8]] == fresh
    assert counted.grown["images_encoded"] == NUM_PAGES
    used = [reply["usage"] for reply in replies]
    first, *others = sorted((use["prompt_tokens"] - use["prompt_tokens_details"]["cached_tokens"] for use in used), reverse=True)
    assert first == used[0]["prompt_tokens"] and max(others) <= QUESTION_TOKENS + BLOCK
    assert counted.grown["computed_tokens"] <= first + sum(others) + sum(use["completion_tokens"] + 2 for use in used)
    assert counted.grown["prompt_tokens"] > 10 * (first + sum(others))


@pytest.mark.gate
def test_one_image_twice_in_a_request_is_encoded_once(demo: Engine) -> None:
    """Red if an image is identified by its place instead of its content."""
    part = image_part(picture(60, 200, 200))
    with Counted(demo) as counted:
        usage(demo, [part, text_part("and"), part, text_part("How many pictures are there?")])
    assert counted.grown["images_encoded"] == 1


@pytest.mark.parametrize("is_known", [False, True])
def test_a_file_twice_is_decoded_no_more_often_than_it_comes(forgetful: Engine, is_known: bool) -> None:
    """Red if an image that comes twice, in one request or in two concurrent ones, is decoded more often than that, or encoded twice."""
    part, *two = screenshots(70 + 3 * is_known, 3)
    others = [*two, text_part("What is it?")]
    salts = map(str, itertools.count())  # so that no prefix is cached
    for content in ([[part], [part, part]], [[part, part, text_part("How many pictures are there?")]]):
        if is_known:
            usage(forgetful, [part], cache_salt=next(salts))
            usage(forgetful, others, cache_salt=next(salts))
        with Counted(forgetful) as counted, ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda content: usage(forgetful, content, cache_salt=next(salts)), content))
        assert counted.grown["images_encoded"] == 1
        assert counted.grown["images_decoded"] <= sum(len([p for p in parts if p["type"] == "image_url"]) for parts in content)
        usage(forgetful, others, cache_salt=next(salts))


def test_a_file_whose_embedding_was_evicted_is_answered_as_if_it_were_new(forgetful: Engine) -> None:
    """Red if a known file is encoded from anything but its pixels, is not decoded although it must be, or is although it need not."""
    pages = screenshots(100, 6)
    content = [pages[0], text_part("and"), pages[1], text_part("What is in the first picture, and what is in the second one?")]

    def ask(salt: str) -> tuple[str, float]:
        with Counted(forgetful) as counted:
            answer = forgetful.text(content, max_tokens=16, ignore_eos=True, cache_salt=salt)
        assert counted.grown["images_encoded"] == counted.grown["images_decoded"]
        return answer, counted.grown["images_decoded"]

    fresh = ask("a")
    assert fresh[1] == 2
    assert ask("b") == (fresh[0], 0)
    usage(forgetful, [pages[2], text_part("and"), pages[3]])
    assert ask("a") == (fresh[0], 0), "its tokens are cached"
    assert ask("c") == fresh
    usage(forgetful, [pages[4], text_part("?")])
    assert ask("d") == (fresh[0], 1)


@pytest.mark.gate
def test_tenants_do_not_share_a_prefix(demo: Engine) -> None:
    """Red if `cache_salt` is ignored: the same prompt under another salt must not hit."""
    content = [*document(80, 2), text_part("What is it?")]
    cached = [usage(demo, content, cache_salt=salt)["prompt_tokens_details"]["cached_tokens"] for salt in ("a", "b", "a")]
    assert cached[:2] == [0, 0] and cached[2] > 0


@pytest.mark.gate
@pytest.mark.parametrize(("path", "is_encoded_again"), [("/reset_prefix_cache", False), ("/flush_cache", True)])
def test_flushed_caches_are_computed_again(demo: Engine, path: str, is_encoded_again: bool) -> None:
    """Red if a request after such a command finds earlier contents, or if the command needs more than an empty POST."""
    content = [*document(400 + 2 * is_encoded_again, 2), text_part("What is in picture 1?")]
    usage(demo, content)
    assert usage(demo, content)["prompt_tokens_details"]["cached_tokens"] > 0
    with Counted(demo) as counted:
        answer = demo.client.post(path)
        assert answer.status_code == 200, answer.text
        assert usage(demo, content)["prompt_tokens_details"]["cached_tokens"] == 0
    assert counted.grown["images_encoded"] == 2 * is_encoded_again
