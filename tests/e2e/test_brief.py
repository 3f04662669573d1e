"""The brief in a few tests, by the HTTP API, `/metrics`, the log, the command line and the messages on the sockets of the run directory.

The imports below are all that a new layout of the packages changes here.
"""

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from engine.wire.arena import ArenaView, create_memfd
from engine.wire.child import Runtime
from engine.wire.config import EngineConfig
from engine.wire.messages import EngineRequest, ImageSource, ImageSpan, Region, WorkerReady
from engine.wire.params import SamplingParams
from engine.wire.stats import Stages
from engine.wire.step_sizes import StepSizes
from models.demo import CHECKPOINT
from tests.e2e.serving import ROOT, Counted, Engine, image_part, picture, text_part
from tests.eventually import HANG_GUARD_S

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

SCHEDULER = "engine.scheduler.main"
NUMBER = CHECKPOINT.parent / "pictures" / "number.png"
RANKS, IMAGE_TOKENS, CHUNK = 2, 50, 64
MIB = 1 << 20
PIXELS = 160 * 320 * 3  # bytes of an image in the arena


class Wire:
    """A real scheduler process on two ranks; the test sends and receives for the processor and the workers."""

    def __init__(self, run_dir: Path, arena: ArenaView, process: "subprocess.Popen[bytes]"):
        self._arena = arena
        self._process = process
        self._used = 0
        self._sockets = [self._socket(zmq.PULL, run_dir / f"{name}.sock") for name in ("processor", "launcher", "worker-0", "worker-1")]
        self._inbox = self._socket(zmq.PUSH, run_dir / "scheduler.sock")
        self._step = 0
        self.plans: list[list[bytes]] = []  # of all ranks, by step
        sizes = StepSizes(mixed=(), cheap=0, usual=CHUNK, usual_sparse=CHUNK, max_mixed_prefill=CHUNK)
        for rank in range(RANKS):
            space = 2 * IMAGE_TOKENS * 1000  # for two embeddings
            self._send(WorkerReady(rank=rank, num_blocks=200, image_cache_bytes=space, bytes_per_image_token=1000, step_sizes=sizes))

    def _socket(self, kind: int, path: Path) -> "zmq.Socket[bytes]":
        socket = zmq.Context.instance().socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * HANG_GUARD_S))
        (socket.bind if kind == zmq.PULL else socket.connect)(f"ipc://{path}")
        return socket

    def _send(self, message: object) -> None:
        self._inbox.send(msgspec.msgpack.encode(message))

    def _store(self, data: bytes) -> Region:
        offset, self._used = self._used, self._used + len(data)
        self._arena.view(offset, len(data))[:] = data
        return Region(1, offset, len(data))

    def ask(self, rid: int, *hashes: bytes) -> list[dict[str, Any]]:
        """Plans of a request of these images, with some text after each, for one token."""
        tokens, images = [1, 2, 3], []
        for content in hashes:
            source = ImageSource("rgb", self._store(bytes([rid]) * PIXELS), 160, 320)
            images.append(ImageSpan(content, len(tokens), IMAGE_TOKENS, (1, 10, 20), source))
            tokens += [9] * IMAGE_TOKENS + [5, 6]
        prompt = self._store(np.asarray(tokens, np.int32).tobytes())
        params = SamplingParams(temperature=0, max_tokens=1)
        self._send(EngineRequest(rid, prompt, images, params, Stages(), cache_salt=str(rid)))
        plans = []
        while not plans or not any(chunk["sample"] for chunk in plans[-1]["chunks"]):
            plans.append(self._answer())
        return plans

    def _answer(self) -> dict[str, Any]:
        """Receive the next plan on every rank, and report its result."""
        data = [socket.recv() for socket in self._sockets[2:]]
        self.plans.append(data)
        plan = read_plan(data[0])
        for rank in range(RANKS):
            tokens = [7 for chunk in plan["chunks"] if chunk["sample"]] if rank == 0 else []
            result = {"rank": rank, "step": plan["step"], "token_ids": tokens, "failed_images": [], "launched": 0.0, "done": 0.0}
            self._send({"type": "StepResult", **result})
        return plan

    def close(self) -> None:
        for socket in (*self._sockets, self._inbox):
            socket.close()
        self._process.terminate()
        assert self._process.wait(HANG_GUARD_S) == 0


def read_plan(data: bytes) -> dict[str, Any]:
    """A plan's names and numbers, from its bytes alone."""
    plan: dict[str, Any] = msgspec.msgpack.decode(data)
    chunk_names, encode_names = ("row", "start", "length", "sample", "blocks", "visual"), ("image_id", "source", "grid")
    plan["chunks"] = [dict(zip(chunk_names, chunk, strict=False)) for chunk in plan["chunks"]]
    plan["encodes"] = [dict(zip(encode_names, encode, strict=False)) for encode in plan["encodes"]]
    return plan


@contextmanager
def running_scheduler() -> Iterator[Wire]:
    with tempfile.TemporaryDirectory() as name:
        fds = (create_memfd("api", MIB), create_memfd("processor", 16 * MIB))
        lifeline, end = os.pipe()
        config = EngineConfig(
            tp=RANKS, max_num_batched_tokens=CHUNK, max_num_mixed_tokens=CHUNK, api_arena_bytes=MIB, processor_arena_bytes=16 * MIB
        )
        runtime = Runtime(config, "torch", "cpu", name, fds, lifeline, 0, str(CHECKPOINT), ("demo",), 4096)
        file = Path(name, "runtime.json")
        file.write_bytes(msgspec.json.encode(runtime))
        process = subprocess.Popen([sys.executable, "-m", SCHEDULER, str(file)], cwd=ROOT, pass_fds=(*fds, lifeline))
        wire = Wire(Path(name), ArenaView(fds[1], 16 * MIB, writable=True), process)
        try:
            yield wire
        finally:
            wire.close()
            for fd in (*fds, lifeline, end):
                os.close(fd)


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with running_scheduler() as running:
        yield running


def test_only_images_that_overlap_the_chunk_are_encoded(wire: Wire) -> None:
    plans = wire.ask(1, *(f"overlap {i}".encode() for i in range(8)))
    starts = [3 + i * (IMAGE_TOKENS + 2) for i in range(8)]
    done = 0
    for plan in plans:
        (chunk,) = plan["chunks"]
        end = chunk["start"] + chunk["length"]
        assert chunk["length"] <= CHUNK
        assert len(plan["encodes"]) == sum(chunk["start"] <= start < end for start in starts)
        done += len(plan["encodes"])
    assert done == 8 and len(plans) > 6


def test_the_image_cache_is_an_lru_by_hash(wire: Wire) -> None:

    def encoded(rid: int, *hashes: bytes) -> int:
        return sum(len(plan["encodes"]) for plan in wire.ask(rid, *hashes))

    assert encoded(10, b"a") == encoded(11, b"b") == 1
    assert encoded(12, b"a") == 0, "another request, the same hash"
    assert encoded(13, b"c") == 1, "evicts b: a was used after it"
    assert encoded(14, b"a") == 0
    assert encoded(15, b"b") == 1, "evicts c"
    assert encoded(16, b"a") == 0 and encoded(17, b"c") == 1


def test_plans_carry_pointers_and_no_pixels(wire: Wire) -> None:
    plans = wire.ask(20, *(f"pointers {i}".encode() for i in range(4)))
    sources = [encode["source"] for plan in plans for encode in plan["encodes"]]
    assert len(sources) == 4 and all(source[1][0] == 1 and source[1][2] == PIXELS for source in sources), "arena, offset, length"
    assert all(len(data) < 2000 for step in wire.plans for data in step)
    values = [value for step in wire.plans for value in flat(msgspec.msgpack.decode(step[0]))]
    assert not [value for value in values if isinstance(value, bytes) and len(value) > 64]


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from flat(inner)
    else:
        yield value


def test_all_ranks_receive_identical_plans(wire: Wire) -> None:
    wire.ask(30, b"identical")
    assert len(wire.plans) > 1 and all(len(set(step)) == 1 for step in wire.plans)


def test_the_chat_api_answers(demo: Engine) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(NUMBER.read_bytes()).decode()}}
    content = [part, text_part("What number is in picture 1?")]
    answer = demo.chat(content).json()
    assert answer["choices"][0]["message"] | {"role": "assistant", "content": "472"} == answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] > 1
    chunks = demo.stream(content)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == "472"


def test_an_image_of_two_requests_is_encoded_once(demo: Engine) -> None:
    first, other = (image_part(picture(seed, 120, 120)) for seed in (900, 901))
    counts = []
    for salt, part in (("a", first), ("b", first), ("c", other)):
        with Counted(demo) as counted:
            demo.text([part, text_part("What is it?")], cache_salt=salt)
        counts.append(counted.grown["images_encoded"])
    assert counts == [1, 0, 1]


def test_chunked_prefill_equals_unchunked(demo: Engine, chunked: Engine) -> None:
    """Red if steps of 64 tokens on two ranks give another text than whole prompts on one rank. The log has the steps and their images."""
    pages = [image_part(picture(910 + i, 200, 200)) for i in range(6)]
    content = [*pages, text_part("Describe the pictures.")]
    fields: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    log_before = len(chunked.log())
    assert chunked.text(content, **fields) == demo.text(content, **fields)
    steps = re.findall(r"(\d+) tokens in \d+ chunks, (\d+) images encoded", chunked.log()[log_before:])
    prefills = [(int(tokens), int(images)) for tokens, images in steps if int(tokens) > 1]
    assert len(prefills) >= 5 and all(tokens <= 64 for tokens, _ in prefills)
    assert sum(images for _, images in prefills) == 6 and max(images for _, images in prefills) <= 3


def test_the_multi_image_probe_runs(demo: Engine, tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    flags = ["--url", demo.url, "--resolutions", "small", "--counts", "1,4", "--repeats", "1", "--json", str(file)]
    run = subprocess.run([sys.executable, "-m", "bench.probe", *flags], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    points = json.loads(file.read_text())["points"]
    assert [point["images"] for point in points] == [1, 4] and all(point["ttft_ms"] > 0 and "error" not in point for point in points)
    assert "largest N answered: small: 4" in run.stdout
