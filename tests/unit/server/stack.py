"""The real api and processor with a scripted scheduler, for integration tests and measurements."""

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from engine.serve import bind
from engine.wire.arena import ArenaView, create_memfd
from engine.wire.child import FAILED, Runtime, Status
from engine.wire.config import EngineConfig
from engine.wire.ipc import Inbox, Outbox
from engine.wire.messages import (
    Abort,
    EngineOutputs,
    EngineRequest,
    Pixels,
    Region,
    RequestOutput,
    ToScheduler,
    WantedPixels,
)
from engine.wire.stats import EngineStats, Stages
from tests.eventually import HANG_GUARD_S, eventually
from tests.unit.server.servers import InProcess, Processes

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
MAX_MODEL_LEN = 4096
HEARTBEAT_S = 0.25
BEAT_NOW = 0  # not a request id: an `Abort` of it asks for a heartbeat

Script = Callable[["FakeScheduler", EngineRequest], None]


class FakeScheduler:
    """Binds the scheduler's inbox; `script` decides what happens to each request. It sends heartbeats as the real one does, and counts
    them in `EngineStats.steps`."""

    def __init__(self, run_dir: str, arena: ArenaView):
        self._inbox: Inbox[ToScheduler] = Inbox(run_dir, "scheduler", ToScheduler)
        self._processor: Outbox[EngineOutputs] = Outbox(run_dir, "processor")
        self.num_beats = 0
        self._sending = threading.Lock()
        self._arena = arena
        self.max_model_len = MAX_MODEL_LEN
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.script: Script = answer_text
        self.requests: list[EngineRequest] = []
        self.aborted: list[int] = []
        self.held: set[int] = set()
        self.pixels: list[Pixels] = []
        self.wants = True  # pixels of all files
        self.loading: dict[int, EngineRequest] = {}  # requests that wait for them

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def prompt(self, request: EngineRequest) -> list[int]:
        ids: list[int] = np.frombuffer(self.bytes_at(request.prompt), dtype=np.int32).tolist()
        return ids

    def image(self, request: EngineRequest, index: int) -> bytes:
        return self.bytes_at(request.images[index].source.region)

    def send(self, outputs: list[RequestOutput], released: list[int]) -> None:
        self._send(EngineOutputs(outputs, released))

    def want(self, rid: int, *indexes: int) -> None:
        self._send(EngineOutputs([], [], wanted=[WantedPixels(rid, list(indexes))]))

    def bytes_at(self, region: Region) -> bytes:
        return bytes(self._arena.view(region.offset, region.length))

    def beat(self) -> None:
        self.num_beats += 1
        drafts: dict[str, Any] = {"drafts": 3, "draft_tokens": 9, "accepted_draft_tokens": 5}
        stats = EngineStats(max_model_len=self.max_model_len, steps=self.num_beats, **drafts)
        self._send(EngineOutputs([], [], stats, time.monotonic()))

    def _accept(self, request: EngineRequest) -> None:
        hashes = [span.hash for span in request.images]
        files = [i for i, span in enumerate(request.images) if span.source.encoding == "file" and hashes.index(span.hash) == i]
        if files and self.wants:
            self.loading[request.rid] = request
            self.want(request.rid, *files)
        else:
            self.requests.append(request)
            self.script(self, request)

    def _take(self, pixels: Pixels) -> None:
        self.pixels.append(pixels)
        request = self.loading.pop(pixels.rid, None)
        if request is not None and pixels.error is not None:
            self.send([RequestOutput(pixels.rid, [], error=pixels.error)], [pixels.rid])
        elif request is not None:
            found = {request.images[i].hash: source for i, source in pixels.sources.items()}
            spans = [msgspec.structs.replace(span, source=found.get(span.hash, span.source)) for span in request.images]
            self.requests.append(msgspec.structs.replace(request, images=spans))
            self.script(self, self.requests[-1])

    def _send(self, message: EngineOutputs) -> None:
        with self._sending:  # tests send from their own thread
            self._processor.send(message)

    def _run(self) -> None:
        last = 0.0
        while not self._stopping.is_set():
            if time.monotonic() - last > HEARTBEAT_S:
                last = time.monotonic()
                self.beat()
            message = self._inbox.recv(timeout=HEARTBEAT_S)
            if isinstance(message, EngineRequest):
                self._accept(message)
            elif isinstance(message, Pixels):
                self._take(message)
            elif message == Abort(BEAT_NOW):
                self.beat()
            elif isinstance(message, Abort):
                self.aborted.append(message.rid)
                if message.rid in self.held or self.loading.pop(message.rid, None) is not None:
                    self.held.discard(message.rid)
                    self.send([], [message.rid])
        for end in (self._inbox, self._processor):
            end.close()


def answer_ids(token_ids: list[int], reason: Any = "stop", step: int = 1) -> Script:
    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        now = time.monotonic()
        stages = Stages(request.stages.received, request.stages.submitted, now, now, now, now)
        for start in range(0, len(token_ids), step):
            is_last = start + step >= len(token_ids)
            piece, first = token_ids[start : start + step], stages if start == 0 else None
            output = RequestOutput(request.rid, piece, reason if is_last else None, None, 3, first)
            scheduler.send([output], [request.rid] if is_last else [])

    return script


def answer_text(scheduler: FakeScheduler, request: EngineRequest) -> None:
    """Echo the last twelve prompt tokens, whatever they are."""
    answer_ids(scheduler.prompt(request)[-12:])(scheduler, request)


def hold(scheduler: FakeScheduler, request: EngineRequest) -> None:
    """Send one token and then nothing until the request is aborted."""
    scheduler.held.add(request.rid)
    scheduler.send([RequestOutput(request.rid, [65], None, None, 0, Stages())], [])


def hold_silently(scheduler: FakeScheduler, request: EngineRequest) -> None:
    scheduler.held.add(request.rid)


class Stack:
    def __init__(self, model_folder: Path, in_process: bool = False, **settings: Any):
        sizes: dict[str, Any] = {"api_arena_bytes": 16 * MIB, "processor_arena_bytes": 32 * MIB}
        config = self.config = EngineConfig(**{"port": 0, "log_level": "warning", **sizes, **settings})
        self.run_dir = tempfile.mkdtemp()
        arena_bytes = config.processor_arena_bytes or 0
        self._fds = create_memfd("api", config.api_arena_bytes or 0), create_memfd("processor", arena_bytes)
        lifeline, self._lifeline_end = os.pipe()
        listener = bind(config.host, config.port)
        inherited = (*self._fds, lifeline, listener.fileno())
        for fd in inherited:
            os.set_inheritable(fd, True)
        place = (self.run_dir, self._fds, lifeline, listener.fileno(), str(model_folder))
        runtime = Runtime(config, "torch", "cpu", *place, ("test-model", "other-name"), MAX_MODEL_LEN)
        self._status: Inbox[Status] = Inbox(self.run_dir, "launcher", Status)
        self.scheduler = FakeScheduler(self.run_dir, ArenaView(self._fds[1], arena_bytes))
        self._to_scheduler: Outbox[ToScheduler] = Outbox(self.run_dir, "scheduler")
        self.servers = InProcess(runtime) if in_process else Processes(runtime, inherited)
        os.close(lifeline)
        listener.close()
        self.scheduler.start()
        self.url = self._await_ready()
        self.http = httpx.Client(base_url=self.url, timeout=HANG_GUARD_S, headers={"Content-Type": "application/json"})
        self._observer = httpx.Client(
            base_url=self.url, timeout=HANG_GUARD_S, verify=False, limits=httpx.Limits(max_keepalive_connections=0),
            headers={b"Authorization": b"Bearer " + (config.api_key or "none").encode()},
        )  # fmt: skip

    @property
    def processes(self) -> "dict[str, subprocess.Popen[bytes]]":
        assert isinstance(self.servers, Processes), "the servers are in this process"
        return self.servers.by_role

    @property
    def local(self) -> InProcess:
        assert isinstance(self.servers, InProcess), "the servers are processes"
        return self.servers

    @property
    def last(self) -> EngineRequest:
        return self.scheduler.requests[-1]

    def prompt(self) -> list[int]:
        return self.scheduler.prompt(self.last)

    @property
    def script(self) -> Script:
        return self.scheduler.script

    @script.setter
    def script(self, script: Script) -> None:
        self.scheduler.script = script

    def _await_ready(self) -> str:
        while True:
            status = self._status.recv(timeout=HANG_GUARD_S)
            assert status is not None, f"no start: {self.failures()}"
            if status.role == "api":
                return status.text

    def failures(self) -> dict[str, str]:
        return {path.stem: path.read_text() for path in Path(self.run_dir).glob(f"*{FAILED}")}

    def chat(self, content: object, **fields: object) -> httpx.Response:
        body = {"model": "test-model", "messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def orphan(self) -> None:
        os.close(self._lifeline_end)
        self._lifeline_end = -1

    def reset(self) -> None:
        self.script = answer_text
        self.scheduler.aborted.clear()

    def recover(self) -> None:
        self.script = answer_text
        assert self.chat("still there?").status_code == 200
        self.settle()

    def settle(self) -> None:
        """Wait until both servers have handled a heartbeat that is sent from now on. At idle each asserts then that its arena is empty.

        The first of two may have been on its way already.
        """
        number = self.scheduler.num_beats + 2
        for _ in range(2):
            self._to_scheduler.send(Abort(BEAT_NOW))
        eventually(lambda: self._last_beat() >= number, f"heartbeat {number}")
        assert not self.failures()

    def _last_beat(self) -> int:
        self.servers.check()
        if isinstance(self.servers, InProcess):
            return self.servers.api.registry.stats.steps
        beat: int = self._observer.get("/server_info").json()["stats"]["steps"]
        return beat

    def close(self) -> None:
        for end in (self.http, self._observer, self.servers):
            end.close()
        self.scheduler.stop()
        self._to_scheduler.close()
        self._status.close()
        for fd in (*self._fds, self._lifeline_end):
            if fd >= 0:
                os.close(fd)
        shutil.rmtree(self.run_dir, ignore_errors=True)


StackOf = Callable[..., Stack]  # the fixture `stack_of`
