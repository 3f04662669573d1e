"""Bad input gets a clear 4xx, and the next request works."""

import base64
import io
import struct
import zlib
from typing import Any

import pytest

from tests.e2e.serving import Engine, data_uri, image_part, picture, text_part

pytestmark = pytest.mark.e2e


def uri(data: bytes, mime: str = "image/jpeg") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def jpeg_bytes(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    picture(seed, 96, 128).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def bogus_huffman_table() -> bytes:
    """A JPEG whose segments are all in order, but whose first DC table names a coefficient size that no baseline file has.

    The server checks structure only: this one is accepted, and the worker's decoder fails.
    """
    data = bytearray(jpeg_bytes())
    table = data.index(b"\xff\xc4")
    data[table + 2 + 2 + 1 + 16] = 0x20  # its first symbol: after marker, length, table id and sixteen counts
    return bytes(data)


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG with a valid header and no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def image(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}, text_part("What is it?")]


def test_bad_images(tiny_engine: Engine) -> None:
    """One of each kind; `tests/unit/server` has the others."""
    cases = {
        "text as image": (uri(b"just some words, no picture at all"), 422),
        "truncated jpeg": (uri(jpeg_bytes()[: len(jpeg_bytes()) // 2]), 422),
        "claims 30000x30000": (uri(png_that_claims(30000, 30000), "image/png"), 400),
        "ratio 1x20000": (data_uri(picture(0, 20000, 1)), 400),
        "more tokens than the encoder takes": (data_uri(picture(0, 1024, 1024)), 400),
        "a private address": ("http://127.0.0.1:1/a.png", 400),
    }
    for name, (url, status) in cases.items():
        response = tiny_engine.chat(image(url))
        assert response.status_code == status, (name, response.text)
        error = response.json()["error"]
        assert error["message"] and error["type"] and "Traceback" not in response.text and "/tmp" not in response.text, name
        assert tiny_engine.text("Still well?"), name


@pytest.mark.gate
def test_an_image_that_fails_in_the_worker(tiny_engine: Engine) -> None:
    for stream in (False, True):
        response = tiny_engine.chat(image(uri(bogus_huffman_table())), stream=stream)
        assert response.status_code == 422, response.text
        assert "could not be decoded" in response.json()["error"]["message"]
        assert tiny_engine.text([image_part(picture(3, 64, 64)), text_part("And this?")])


def test_bad_bodies(tiny_engine: Engine) -> None:
    """One of each kind; `tests/unit/server` has the others."""
    cases = {
        "no json": (b"{not json", 400),
        "a wrong model": (b'{"model": "gpt-17", "messages": [{"role": "user", "content": "hi"}]}', 404),
        "a prompt that is too long": (b'{"messages": [{"role": "user", "content": "' + b"word " * 9000 + b'"}]}', 400),
    }
    for name, (body, status) in cases.items():
        response = tiny_engine.client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == status and response.json()["error"]["message"], (name, response.text)
        assert tiny_engine.text("Still well?"), name


@pytest.mark.gate
def test_the_other_pages(tiny_engine: Engine) -> None:
    assert tiny_engine.client.get("/health").status_code == 200
    assert tiny_engine.client.get("/v1/models").json()["data"][0]["max_model_len"] == 2048
    assert "engine_stage_seconds" in tiny_engine.client.get("/metrics").text
    assert tiny_engine.client.get("/nowhere").status_code == 404
