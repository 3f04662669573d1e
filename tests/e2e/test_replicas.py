"""`python -m engine.launch.replicas`: engines on Ray Serve behind its HAProxy, a cluster of this machine alone."""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import ROOT, SMALL, LongAnswer, chat_body, is_alive, text_part
from tests.eventually import eventually

pytest.importorskip("ray", reason='pip install -e ".[ray]"')

pytestmark = pytest.mark.replicas

STARTED = r"Started HTTP server on port (\d+)"
GUARD_S = 300.0  # a hang guard: Ray takes minutes to start and to replace a replica on a busy machine


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def family_of(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found + [child for own in found for child in family_of(own)]


class Cluster:
    def __init__(self, model: Path, replicas: int, *flags: str):
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.flags = ["--model", str(model), "--port", str(port), "--shutdown-timeout", str(int(GUARD_S)), *SMALL]
        self.log_path = Path(tempfile.mkstemp(prefix="replicas-test-", suffix=".log")[1])
        command = [sys.executable, "-m", "engine.launch.replicas", "--replicas", str(replicas), *flags, *self.flags]
        environment = dict(os.environ) | {"RAY_DEDUP_LOGS": "0"}
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.address = self.await_log(rf"ready: \S+ by {replicas} replicas, on the Ray cluster (\S+)")[0]
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def log(self) -> str:
        return self.log_path.read_text()

    def answer(self, session: str, num_tokens: int) -> LongAnswer:
        return LongAnswer(self.url, num_tokens, GUARD_S, **{"x-session-id": session})

    def await_log(self, pattern: str, count: int = 1) -> list[str]:
        eventually(lambda: self.process.poll() is not None or len(re.findall(pattern, self.log())) >= count, pattern, GUARD_S)
        found = re.findall(pattern, self.log())
        assert len(found) >= count, self.log()[-6000:]
        return found

    def requests_of(self, port: str) -> float:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        return sum(float(value) for value in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.MULTILINE))

    def workers(self) -> list[int]:
        return [pid for pid in family_of(self.process.pid) if b"engine.worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextlib.contextmanager
def running(model: Path, replicas: int, *flags: str) -> Iterator[Cluster]:
    cluster = Cluster(model, replicas, *flags)
    started = family_of(cluster.process.pid)
    try:
        yield cluster
    finally:
        cluster.client.close()
        cluster.process.send_signal(signal.SIGTERM)
        code = cluster.process.wait(GUARD_S)
    assert code == 0, cluster.log()[-6000:]
    eventually(lambda: not any(is_alive(pid) for pid in started), "the end of all processes", GUARD_S)
    cluster.log_path.unlink()


@contextlib.contextmanager
def busy(cluster: Cluster, num_clients: int, num_tokens: int) -> Iterator[None]:
    is_over = threading.Event()

    def client(index: int) -> set[str]:
        outcomes = set()
        while not is_over.is_set():
            outcomes.add(cluster.answer(f"busy {index}", num_tokens).join())
        return outcomes

    with ThreadPoolExecutor(num_clients) as pool:
        clients = pool.map(client, range(num_clients))
        try:
            yield
        finally:
            is_over.set()
    assert set().union(*clients) == {"whole"}


# Before the others: HAProxy has ports that only one cluster of a machine can have.
def test_busy_replicas_get_another_one(tiny: Path) -> None:
    with running(tiny, 1, "--max-replicas", "2", "--max-num-seqs", "4") as cluster, busy(cluster, 8, 100):
        cluster.await_log(STARTED, count=2)


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[Cluster]:
    with running(tiny, 2) as cluster:
        yield cluster


def ports(cluster: Cluster) -> list[str]:
    return sorted(set(cluster.await_log(STARTED, count=2)))


def test_a_session_stays_on_its_replica_and_sessions_spread(cluster: Cluster) -> None:
    def all_answered() -> bool:
        assert cluster.client.post("/v1/chat/completions", json=chat_body("Hello")).status_code == 200
        return all(cluster.requests_of(port) for port in ports(cluster))

    eventually(all_answered, "answers of both replicas", GUARD_S)  # HAProxy learns of a replica a second after it is ready
    counts = [cluster.requests_of(port) for port in ports(cluster)]
    num_moved = 0
    for session in range(12):
        headers = {"x-session-id": f"conversation {session}"}
        for _ in range(3):
            response = cluster.client.post("/v1/chat/completions", json=chat_body("Hello"), headers=headers)
            assert response.status_code == 200, response.text
        now = [cluster.requests_of(port) for port in ports(cluster)]
        num_moved += sorted(new - old for new, old in zip(now, counts, strict=True)) != [0, 3]
        counts = now
    assert num_moved == 0 and min(counts) >= 6


def test_a_replica_that_dies_is_replaced_and_its_clients_are_told(cluster: Cluster) -> None:
    answers = [cluster.answer(f"conversation {i}", 1500) for i in range(6)]
    before = cluster.workers()
    assert len(before) == 2
    subprocess.run(["kill", "-9", str(before[0])], check=True)
    assert {answer.join() for answer in answers} == {"whole", "error"}
    eventually(lambda: len(cluster.workers()) == 2 and before[0] not in cluster.workers(), "another worker", GUARD_S)
    cluster.await_log(STARTED, count=3)
    body = chat_body([text_part("Hello")])

    def all_succeed() -> bool:
        return all(cluster.client.post("/v1/chat/completions", json=body).status_code == 200 for _ in range(8))

    eventually(all_succeed, "good answers of both replicas", GUARD_S)


def test_a_rolling_update_drops_no_stream_and_no_request(cluster: Cluster) -> None:
    before = cluster.workers()
    command = [sys.executable, "-m", "engine.launch.replicas", "--replicas", "2", "--address", cluster.address, *cluster.flags]
    with busy(cluster, 6, 600):
        update = subprocess.Popen([*command, "--max-num-seqs", "64"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        statuses = set()
        for number in itertools.takewhile(lambda _: update.poll() is None, itertools.count()):
            session = {"x-session-id": f"short {number}"}
            statuses.add(cluster.client.post("/v1/chat/completions", json=chat_body("Hello"), headers=session).status_code)
        said = update.communicate()[0]
        eventually(lambda: not set(before) & set(cluster.workers()), "the end of the old replicas", GUARD_S)
    assert update.returncode == 0, said
    assert statuses == {200}
