"""Media in every form: each has its status, none causes a server error, and a good request is answered after each."""

import json
from collections.abc import Mapping
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


def check(stack: Stack, cases: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
    """Send an image part per URL; compare the statuses, and answer a good request after each."""
    wrong = {}
    for name, (url, statuses) in cases.items():
        body = json.dumps({"messages": [{"role": "user", "content": [image(url)]}]}).encode()
        response = stack.http.post("/v1/chat/completions", content=body)
        if response.status_code not in statuses or not (response.status_code == 200 or response.json()["error"]["message"]):
            wrong[name] = response.text
        assert stack.chat("still there?").json()["choices"][0]["message"]["content"], name
    assert not wrong


@pytest.mark.hostile
@pytest.mark.gate
def test_every_file_has_its_status(stack: Stack) -> None:
    """Red if a file of any kind is a 5xx or ends a process; or if one that is good is refused, or the other way round."""
    assert sum(statuses == BAD for _, statuses in CORPUS.values()) > 50
    check(stack, {name: (uri(data), statuses) for name, (data, statuses) in CORPUS.items()})


def test_every_url_has_its_status(stack: Stack) -> None:
    """As above, for URLs without a file."""
    check(stack, URLS)
