"""How fast the api and the processor are: `python -m tests.unit.server.measure MODEL_FOLDER`. No test: it needs a quiet machine."""

import asyncio
import base64
import http.client
import io
import json
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image

from engine.messages import EngineRequest, RequestOutput, Stages
from server.http.scan import Scanner
from tests.unit.server.stack import MIB, FakeScheduler, Stack, answer_ids

CHUNK = 1 << 16
NUM_STREAMS = 64
TOKENS = 600
STEP_S = 1 / 150  # pace of a decoding engine


def noise_jpeg(seed: int, height: int = 720, width: int = 1280) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()


def chat_body(num_images: int, seed: int) -> bytes:
    urls = ["data:image/jpeg;base64," + base64.b64encode(noise_jpeg(seed + i)).decode() for i in range(num_images)]
    parts: list[dict[str, object]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": "What do you see? " * 60})
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 8}).encode()


def measure_scanner(body: bytes) -> None:
    chunks = [body[i : i + CHUNK] for i in range(0, len(body), CHUNK)]
    best = 1e9
    for _ in range(5):
        scanner = Scanner("0" * 32, 129)
        start = time.perf_counter()
        for chunk in chunks:
            scanner.feed(chunk)
        best = min(best, time.perf_counter() - start)
    print(f"scanner: {len(body) / best / 1e9:.1f} GB/s on {len(body) / 1e6:.0f} MB in chunks of {CHUNK >> 10} KiB")


def measure_images(stack: Stack, num_images: int) -> None:
    """Submission to the scheduler, measured from the last byte handed to the socket by the client, and by the engine's own stages."""
    stack.scheduler.script = answer_ids([65, 66])
    for attempt in range(4):
        body = chat_body(num_images, 1000 * attempt)
        connection = http.client.HTTPConnection(stack.url.removeprefix("http://"))
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        start = time.monotonic()
        connection.send(body)
        sent = time.monotonic()
        assert connection.getresponse().status == 200
        request = stack.scheduler.requests[-1]
        prepare = request.stages.submitted - request.stages.received
        print(
            f"{num_images} images, {len(body) / 1e6:.0f} MB body: sending {1e3 * (sent - start):.1f} ms, last byte to EngineRequest "
            f"{1e3 * (stack.scheduler.arrivals[-1] - sent):.1f} ms by the client's clock, {1e3 * prepare:.1f} ms in the processor"
        )
        connection.close()


class Streamer:
    """A scheduler script that collects requests, then decodes them in lockstep: one token each a step, at the pace of an engine."""

    def __init__(self) -> None:
        self.waiting: list[EngineRequest] = []

    def __call__(self, scheduler: FakeScheduler, request: EngineRequest) -> None:
        self.waiting.append(request)
        if len(self.waiting) < NUM_STREAMS:
            return
        rids = [request.rid for request in self.waiting]
        start = time.monotonic()
        for step in range(TOKENS):
            time.sleep(max(0.0, start + step * STEP_S - time.monotonic()))
            reason = "length" if step == TOKENS - 1 else None
            stages = Stages() if step == 0 else None
            outputs = [RequestOutput(rid, [300 + step % 90_000], reason, None, 0, stages) for rid in rids]  # type: ignore[arg-type]
            scheduler.send(outputs, rids if reason else [])
            if step % 50 == 0:
                scheduler.beat()
        self.waiting.clear()


async def read_stream(host: str, port: int) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": TOKENS}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    num_chunks = 0
    while True:
        data = await reader.read(1 << 18)
        num_chunks += data.count(b'"content":')
        if b"[DONE]" in data or not data:
            writer.close()
            return num_chunks


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def stream_all(host: str, port: int) -> int:
    counts = await asyncio.gather(*(read_stream(host, port) for _ in range(NUM_STREAMS)))
    return sum(counts)


def measure_tokens(stack: Stack) -> None:
    stack.scheduler.script = Streamer()
    host, port = stack.url.removeprefix("http://").split(":")
    before = {role: cpu_seconds(process.pid) for role, process in stack.processes.items()}
    start = time.perf_counter()
    num_chunks = asyncio.run(stream_all(host, int(port)))
    elapsed = time.perf_counter() - start
    num_tokens = NUM_STREAMS * TOKENS
    print(f"tokens: {num_tokens / elapsed:,.0f}/s over {NUM_STREAMS} streams ({num_chunks} chunks), client and scheduler on the same cores")
    for role, process in stack.processes.items():
        spent = cpu_seconds(process.pid) - before[role]
        print(f"  {role}: {1e6 * spent / num_tokens:.1f} us of CPU a token = {num_tokens / spent:,.0f} tokens/s on one core")


def main() -> None:
    folder = Path(sys.argv[1])
    measure_scanner(chat_body(32, 0))
    small = msgspec.json.encode({"messages": [{"role": "user", "content": "x" * 400}]})
    start = time.perf_counter()
    for _ in range(10_000):
        scanner = Scanner("0" * 32, 129)
        scanner.feed(small)
        scanner.json(memoryview(b""))
    print(f"scanner: {(time.perf_counter() - start) * 100:.1f} us for a body of {len(small)} bytes")
    stack = Stack(folder, max_model_len=262_144, api_arena_bytes=256 * MIB, processor_arena_bytes=256 * MIB)
    try:
        measure_images(stack, 32)
        measure_tokens(stack)
        stack.settle()
    finally:
        stack.close()


if __name__ == "__main__":
    main()
