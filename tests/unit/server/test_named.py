"""Images by the names that clients give them."""

import base64
from typing import Any

import httpx
from PIL import Image

from tests.unit.server.clips import encode, frames_of
from tests.unit.server.pictures import save
from tests.unit.server.stack import Stack
from tests.unit.server.test_stack import user


def part(url: object, uuid: str = "first") -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": url, "uuid": uuid}]


def test_a_known_image_needs_no_url(stack: Stack) -> None:
    hashes = set()
    for url, salt in ((URL, None), (None, None), ({"url": None}, None), (None, "")):
        assert stack.chat(part(url), cache_salt=salt).status_code == 200
        hashes.add(stack.last.images[0].hash)
    assert len(hashes) == 1
    for refused in (stack.chat(part(None), cache_salt="tenant"), stack.chat(part(None, "second"))):
        check_refusal(refused, "unknown_uuid", "Image 1: no media with this uuid")
    body = {"messages": user(part(None))}
    other = stack.http.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer of-another"})
    check_refusal(other, "unknown_uuid", "")
    assert stack.http.post("/tokenize", json=body).status_code == 200


def check_refusal(response: httpx.Response, code: str, words: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code) and error["message"].startswith(words), error


def test_a_name_means_its_latest_content(stack: Stack) -> None:
    hashes = []
    for url in (URL, OTHER, None):
        assert stack.chat(part(url, "bound")).status_code == 200
        hashes.append(stack.last.images[0].hash)
    assert hashes[0] != hashes[1] == hashes[2]
    clip = "data:video/mp4;base64," + base64.b64encode(encode(frames_of(4))).decode()
    video = {"type": "video_url", "video_url": {"url": clip}, "uuid": "bound"}
    assert stack.chat([video]).status_code == 200
    assert stack.chat(part(None, "bound")).status_code == 422  # it is a video now


def picture(*colour: int) -> str:
    return "data:image/png;base64," + base64.b64encode(save(Image.new("RGB", (90, 70), colour), "PNG")).decode()


URL, OTHER = picture(200, 30, 30), picture(20, 30, 230)


def test_documents_may_be_named_too(stack: Stack) -> None:
    for url, uuid in ((None, "unknown"), ({"url": None}, "unknown"), ({"url": None}, None), (None, None)):
        item = {"content": [{"type": "image_url", "image_url": url} | ({} if uuid is None else {"uuid": uuid})]}
        for query, document in ((item, "text"), ("text", item)):
            for path, body in (
                ("/rerank", {"query": query, "documents": [document]}), ("/score", {"text_1": query, "text_2": document}),
            ):  # fmt: skip
                refused = stack.http.post(path, json=body)
                assert refused.status_code == 400, refused.text
                assert (refused.json()["error"]["code"] == "unknown_uuid") == (uuid is not None)
