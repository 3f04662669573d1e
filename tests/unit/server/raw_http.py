"""Requests as bytes, and clients of a running stack that speak HTTP themselves."""

import json
import os
import socket
from typing import Any

from tests.unit.server.pictures import PLAIN
from tests.unit.server.stack import Stack
from tests.unit.server.test_stack import image, uri

JPEG = PLAIN["4:2:0"]
CHUNKED = b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Counted(bytes):
    """Bytes that count how many of them are searched or copied, in all pieces cut from them."""

    num_touched = 0

    def find(self, text: Any, start: Any = 0, end: Any = None) -> int:
        found = super().find(text, start, end)
        Counted.num_touched += (min(len(self), end if end is not None else len(self)) if found < 0 else found) - start
        return found

    def __getitem__(self, key: Any) -> Any:
        return Counted.copied(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)

    def __radd__(self, other: bytes | bytearray) -> Any:
        if isinstance(other, bytearray):  # appended in place
            Counted.num_touched += len(self)
            other.extend(bytes(self))
            return other
        return Counted.copied(bytes(other) + bytes(self))

    def count(self, *arguments: Any) -> int:
        Counted.num_touched += len(self)
        return super().count(*arguments)

    def replace(self, *arguments: Any) -> "Counted":
        return Counted.copied(super().replace(*arguments))

    @staticmethod
    def copied(data: bytes) -> "Counted":
        Counted.num_touched += len(data)
        return Counted(data)


def large_image(num_bytes: int) -> bytes:
    comment = b"\xff\xfe\xff\xff" + os.urandom(65_533)
    return JPEG[:2] + comment * (num_bytes // len(comment)) + JPEG[2:]


def body_of(*images: bytes, **fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": [image(uri(data)) for data in images]}], **fields}).encode()


def text_body(text: str = "x", **fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


def head_of(length: int, path: str = "/v1/chat/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


def request_of(body: bytes, path: str = "/v1/chat/completions") -> bytes:
    return head_of(len(body), path) + body


def packets(data: bytes) -> list[bytes]:
    size = 1 << 18
    return [data[start : start + size] for start in range(0, len(data), size)]


def connect(stack: Stack) -> socket.socket:
    host, port = stack.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.connect((host, int(port)))
    return connection


def read_answer(connection: socket.socket) -> tuple[int, dict[str, object]]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1)
    length = int(data.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    return int(data.split()[1]), json.loads(body)
