"""CPU time of the api and the processor for a streamed token: `python -m bench.tokens`, from a clone, on Linux, alone on the machine.

Both are the real processes. A script in place of the scheduler sends a token to each of 64 streams at the rate of a decoding GPU, so that
neither a model nor a client determines how many tokens arrive together.
"""

import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

from engine.wire.messages import (
    EngineRequest,
    RequestOutput,
)
from engine.wire.stats import Stages
from models.scaffold import SHAPES, write_model_folder
from tests.unit.server.stack import MIB, FakeScheduler, Stack

NUM_STREAMS = 64
NUM_TOKENS = 600  # of a stream
STEP_S = 1 / 150


class Streamer:
    """A scheduler script that collects requests, then decodes them in lockstep."""

    def __init__(self) -> None:
        self._waiting: list[EngineRequest] = []

    def __call__(self, scheduler: FakeScheduler, request: EngineRequest) -> None:
        self._waiting.append(request)
        if len(self._waiting) < NUM_STREAMS:
            return
        rids = [request.rid for request in self._waiting]
        start = time.monotonic()
        for step in range(NUM_TOKENS):
            time.sleep(max(0.0, start + step * STEP_S - time.monotonic()))
            is_last = step == NUM_TOKENS - 1
            stages = Stages() if step == 0 else None
            outputs = [RequestOutput(rid, [300 + step % 90_000], "length" if is_last else None, stages=stages) for rid in rids]
            scheduler.send(outputs, rids if is_last else [])
            if step % 50 == 0:
                scheduler.beat()
        self._waiting.clear()


async def read_stream(host: str, port: int) -> int:
    """Chunks of one stream."""
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": NUM_TOKENS}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    num_chunks = 0
    while True:
        data = await reader.read(1 << 18)
        num_chunks += data.count(b'"content":')
        if b"[DONE]" in data or not data:
            writer.close()
            return num_chunks


async def read_all(host: str, port: int) -> int:
    return sum(await asyncio.gather(*(read_stream(host, port) for _ in range(NUM_STREAMS))))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Entry point."""
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), SHAPES["tiny"], weights="none", seed=0)
        stack = Stack(Path(folder), api_arena_bytes=16 * MIB, processor_arena_bytes=16 * MIB)
        try:
            stack.scheduler.script = Streamer()
            host, port = stack.url.removeprefix("http://").split(":")
            before = {role: cpu_seconds(process.pid) for role, process in stack.processes.items()}
            num_chunks = asyncio.run(read_all(host, int(port)))
            for role, process in stack.processes.items():
                spent = cpu_seconds(process.pid) - before[role]
                print(f"{role}: {1e6 * spent / (NUM_STREAMS * NUM_TOKENS):.1f} us of CPU a token ({num_chunks} chunks)")
        finally:
            stack.close()


if __name__ == "__main__":
    main()
