"""Media in every form: each has its status, nothing is a bug of ours, and a good request is answered after each."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.server.media_corpus import BAD, CORPUS
from tests.unit.server.stack import Stack
from tests.unit.server.test_stack import image, uri

URLS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "an empty URL": ("", BAD),
    "no scheme": ("x.png", BAD),
    "javascript": ("javascript:alert(1)", BAD),
    "no payload": ("data:image/png;base64,", BAD),
    "no comma": ("data:image/png;base64", BAD),
    "half a character": ("data:image/png;base64,A", BAD),
    "a number": (5, BAD),
    "null": (None, BAD),
    "a list": (["data:"], BAD),
    "many redirections of a scheme": ("data:data:data:,x", BAD),
    "FTP": ("ftp://x.org/x.png", BAD),
    "a socket": ("http://[::1]/x.png", BAD),
    "credentials": ("http://a:b@x.org/", BAD),
    "a port that is none": ("http://x.org:99999/", BAD),
    "percent": ("data:image/png,%ff%d8%ff", BAD),
}


def check(stack: Stack, content: object, statuses: tuple[int, ...]) -> None:
    started = time.monotonic()
    response = stack.http.post("/v1/chat/completions", content=json.dumps({"messages": [{"role": "user", "content": content}]}).encode())
    assert response.status_code in statuses, response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    assert time.monotonic() - started < 5
    assert stack.chat("still there?").json()["choices"][0]["message"]["content"]


@pytest.fixture(autouse=True, scope="module")
def clean(running_stack: Stack) -> Iterator[None]:
    """At the end both arenas are empty."""
    yield
    running_stack.recover()


@pytest.mark.parametrize("name", CORPUS)
def test_every_file_has_its_status(stack: Stack, name: str) -> None:
    """Red if a file of any form is a 5xx, a wait, or the end of a process; or one that is good is refused, or the other way round."""
    data, statuses = CORPUS[name]
    check(stack, [image(uri(data))], statuses)


@pytest.mark.parametrize("name", URLS)
def test_every_url_has_its_status(stack: Stack, name: str) -> None:
    """The same of what is no file."""
    url, statuses = URLS[name]
    check(stack, [image(url)], statuses)


def test_the_corpus_is_large_enough() -> None:
    """Red if the cases get lost: a test of nothing is always green."""
    assert len(CORPUS) > 150 and sum(statuses == BAD for _, statuses in CORPUS.values()) > 50
