"""Bad input gets a clear 4xx within seconds, and the next request works. One engine for all of it."""

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import Engine, data_uri, image_part, picture, serve, text_part

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with serve(tiny, "--max-model-len", "2048", "--max-num-encoder-tokens", "512", "--max-num-batched-tokens", "512") as running:
        yield running


def uri(data: bytes, mime: str = "image/jpeg") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def jpeg_bytes(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    picture(seed, 96, 128).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def bogus_huffman_table() -> bytes:
    """A JPEG whose segments are all in order, but whose first DC table names a coefficient size that no baseline file has.

    The door looks at structure only, so that this one is accepted and fails in the worker's decoder.
    """
    data = bytearray(jpeg_bytes())
    table = data.index(b"\xff\xc4")
    data[table + 2 + 2 + 1 + 16] = 0x20  # its first symbol: behind marker, length, table id and sixteen counts
    return bytes(data)


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG whose header is in order and whose pixels are not there: it must be refused by its size, before any pixel is allocated."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def image(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}, text_part("What is it?")]


BAD_IMAGES = {
    "bad base64": (uri(b"")[:-2] + "data:image/png;base64,@@@@", 422),
    "no payload": ("data:image/png;base64,", 422),
    "text as image": (uri(b"just some words, no picture at all"), 422),
    "truncated jpeg": (uri(jpeg_bytes()[: len(jpeg_bytes()) // 2]), 422),
    "claims 30000x30000": (uri(png_that_claims(30000, 30000), "image/png"), 400),
    "ratio 1x20000": (data_uri(picture(0, 20000, 1)), 400),
    "more tokens than the encoder takes": (data_uri(picture(0, 1024, 1024)), 400),
    "svg": (uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), 422),
    "no such scheme": ("ftp://example.org/a.png", 400),
    "a file that is not allowed": ("file:///etc/hostname", 400),
    "a private address": ("http://127.0.0.1:1/a.png", 400),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_bad_images(engine: Engine, name: str) -> None:
    """Red if a bad image is a 500, hangs, or harms the next request."""
    url, status = BAD_IMAGES[name]
    response = engine.chat(image(url))
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"] and error["type"] and "Traceback" not in response.text and "/tmp" not in response.text
    assert engine.text("Still well?")


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_that_fails_in_the_worker(engine: Engine, stream: bool) -> None:
    """Red if a JPEG that fails after it was accepted kills the engine, is answered, or fails a request beside it."""
    response = engine.chat(image(uri(bogus_huffman_table())), stream=stream)
    assert response.status_code == 422, response.text
    assert "could not be decoded" in response.json()["error"]["message"]
    assert engine.text([image_part(picture(3, 64, 64)), text_part("And this?")])


BODIES: dict[str, tuple[bytes, int]] = {
    "no json": (b"{not json", 400),
    "not an object": (b"[]", 400),
    "no messages": (b'{"model": ""}', 400),
    "unknown model": (b'{"model": "gpt-17", "messages": [{"role": "user", "content": "hi"}]}', 404),
    "bad temperature": (b'{"temperature": -3, "messages": [{"role": "user", "content": "hi"}]}', 400),
    "not a number": (b'{"temperature": NaN, "messages": [{"role": "user", "content": "hi"}]}', 400),
    "nested": (b'{"messages": ' + b"[" * 1000 + b"]" * 1000 + b"}", 400),
    "10001 messages": (b'{"messages": [' + b",".join([b'{"role": "user", "content": "a"}'] * 10001) + b"]}", 400),
    "a prompt that is too long": (b'{"messages": [{"role": "user", "content": "' + b"word " * 9000 + b'"}]}', 400),
}


@pytest.mark.parametrize("name", BODIES)
def test_bad_bodies(engine: Engine, name: str) -> None:
    """Red if a bad body is anything but its 4xx with an error object."""
    body, status = BODIES[name]
    response = engine.client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]
    assert engine.text("Still well?")


def test_the_other_pages(engine: Engine) -> None:
    """Red if a client that looks around finds nothing."""
    assert engine.client.get("/health").status_code == 200
    assert engine.client.get("/v1/models").json()["data"][0]["max_model_len"] == 2048
    assert "engine_stage_seconds" in engine.client.get("/metrics").text
    assert engine.client.get("/nowhere").status_code == 404
