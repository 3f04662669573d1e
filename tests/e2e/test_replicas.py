"""`python -m engine.replicas`: engines on Ray Serve behind its HAProxy, a cluster of this machine alone."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import ROOT, SMALL, chat_body, is_alive, text_part

pytest.importorskip("ray", reason='pip install -e ".[ray]"')

pytestmark = pytest.mark.replicas

STARTED = r"Started HTTP server on port (\d+)"
START_S, REPLACE_S, STOP_S = 120, 90, 60


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def family_of(pid: int) -> list[int]:
    """All processes below this one, whichever of its threads started them."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found + [child for own in found for child in family_of(own)]


class Cluster:
    """A running `engine.replicas`."""

    def __init__(self, model: Path, replicas: int, *flags: str):
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.flags = ["--model", str(model), "--port", str(port), *SMALL]
        self.log_path = Path(tempfile.mkstemp(prefix="replicas-test-", suffix=".log")[1])
        command = [sys.executable, "-m", "engine.replicas", "--replicas", str(replicas), *flags, *self.flags]
        environment = dict(os.environ) | {"RAY_DEDUP_LOGS": "0"}
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.address = self.await_log(rf"ready: \S+ by {replicas} replicas, on the Ray cluster (\S+)", START_S)[0]
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def log(self) -> str:
        return self.log_path.read_text()

    def await_log(self, pattern: str, timeout: float, count: int = 1) -> list[str]:
        """All matches in the log, as soon as there are so many."""
        deadline = time.monotonic() + timeout
        while len(found := re.findall(pattern, self.log())) < count:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()[-6000:]
            time.sleep(0.1)
        return found

    def requests_of(self, port: str) -> float:
        """Chat completions that the replica at this port has answered."""
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        return sum(float(value) for value in re.findall(r"^engine_finished_requests_total\{.*\} (\S+)$", text, re.MULTILINE))

    def workers(self) -> list[int]:
        return [pid for pid in family_of(self.process.pid) if b"engine.worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextlib.contextmanager
def running(model: Path, replicas: int, *flags: str) -> Iterator[Cluster]:
    """A cluster that is stopped, and checked to be gone, at the end."""
    cluster = Cluster(model, replicas, *flags)
    started = family_of(cluster.process.pid)
    try:
        yield cluster
    finally:
        cluster.client.close()
        cluster.process.send_signal(signal.SIGTERM)
        code = cluster.process.wait(STOP_S)
    assert code == 0, cluster.log()[-6000:]
    deadline = time.monotonic() + STOP_S
    while left := [pid for pid in started if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.1)
    cluster.log_path.unlink()


def read_stream(url: str, session: str, num_tokens: int, ended: list[str]) -> None:
    """Streams a long answer; how it ended."""
    body = chat_body("go on", max_tokens=num_tokens, ignore_eos=True, stream=True)
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers={"x-session-id": session}, timeout=90) as response:
            lines = [line for line in response.iter_lines() if line]
        ended.append("whole" if lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2] else lines[-1])
    except httpx.HTTPError as error:
        ended.append(f"broken: {error}")


# Before the others: HAProxy has ports that only one cluster of a machine can have.
def test_busy_replicas_get_another_one(tiny: Path) -> None:
    """Red if autoscaling does not see requests that pass HAProxy, or ignores how many one engine runs at once."""
    with running(tiny, 1, "--max-replicas", "2", "--max-num-seqs", "4") as cluster:
        ended: list[list[str]] = [[] for _ in range(8)]
        is_over = threading.Event()

        def keep_busy(index: int) -> None:
            while not is_over.is_set():
                read_stream(cluster.url, f"busy {index}", 100, ended[index])

        clients = [threading.Thread(target=keep_busy, args=(index,)) for index in range(8)]
        for client in clients:
            client.start()
        try:
            cluster.await_log(STARTED, 2 * REPLACE_S, count=2)
        finally:
            is_over.set()
            for client in clients:
                client.join(90)
        assert {outcome for outcomes in ended for outcome in outcomes} == {"whole"}


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[Cluster]:
    with running(tiny, 2) as cluster:
        yield cluster


def ports(cluster: Cluster) -> list[str]:
    return sorted(set(cluster.await_log(STARTED, START_S, count=2)))


def test_a_session_stays_on_its_replica_and_sessions_spread(cluster: Cluster) -> None:
    """Red if HAProxy does not hash the header, or hashes all to one."""
    deadline = time.monotonic() + START_S
    while not all(cluster.requests_of(port) for port in ports(cluster)):  # HAProxy hears of a replica a second after it is ready
        assert cluster.client.post("/v1/chat/completions", json=chat_body("Hello")).status_code == 200 and time.monotonic() < deadline
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
    """Red if a client of a dead engine waits or takes its half for the whole, one of the other notices, or nobody takes its place."""
    ended: list[list[str]] = [[] for _ in range(6)]
    clients = [threading.Thread(target=read_stream, args=(cluster.url, f"conversation {i}", 1500, ended[i])) for i in range(6)]
    for client in clients:
        client.start()
    time.sleep(1.5)
    before = cluster.workers()
    assert len(before) == 2
    subprocess.run(["kill", "-9", str(before[0])], check=True)
    for client in clients:
        client.join(90)
    outcomes = [outcome[0] for outcome in ended]
    errors = [outcome for outcome in outcomes if outcome != "whole"]
    assert 0 < len(errors) < 6, outcomes
    assert all('"error"' in outcome for outcome in errors), outcomes
    deadline = time.monotonic() + REPLACE_S
    while len(cluster.workers()) != 2 or before[0] in cluster.workers() or len(ports(cluster)) < 2:
        assert time.monotonic() < deadline, cluster.log()[-6000:]
        time.sleep(0.2)
    cluster.await_log(STARTED, REPLACE_S, count=3)
    deadline = time.monotonic() + REPLACE_S
    while any(cluster.client.post("/v1/chat/completions", json=chat_body([text_part("Hello")])).status_code != 200 for _ in range(8)):
        assert time.monotonic() < deadline, cluster.log()[-6000:]
        time.sleep(0.5)


def test_a_rolling_update_drops_no_stream_and_no_request(cluster: Cluster) -> None:
    """Red if a new version cuts streams of the old one, or a request finds nobody meanwhile."""
    ended: list[list[str]] = [[] for _ in range(6)]
    clients = [threading.Thread(target=read_stream, args=(cluster.url, f"update {i}", 600, ended[i])) for i in range(6)]
    for client in clients:
        client.start()
    time.sleep(1)
    before = cluster.workers()
    command = [sys.executable, "-m", "engine.replicas", "--replicas", "2", "--address", cluster.address, *cluster.flags]
    update = subprocess.Popen([*command, "--max-num-seqs", "64"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    statuses: list[int] = []
    num_started = len(re.findall(STARTED, cluster.log()))
    has_overlapped = False
    while update.poll() is None:
        is_replacing = len(re.findall(STARTED, cluster.log())) > num_started  # what was there before has begun to go
        has_overlapped |= is_replacing and any(client.is_alive() for client in clients)
        session = {"x-session-id": f"short {len(statuses)}"}
        statuses.append(cluster.client.post("/v1/chat/completions", json=chat_body("Hello"), headers=session).status_code)
        time.sleep(0.1)
    said = update.communicate()[0]
    for client in clients:
        client.join(90)
    assert update.returncode == 0, said
    assert [outcome[0] for outcome in ended] == ["whole"] * 6
    assert has_overlapped and len(statuses) > 10 and set(statuses) == {200}
    deadline = time.monotonic() + REPLACE_S
    while set(before) & set(cluster.workers()):
        assert time.monotonic() < deadline, "the old replicas stay"
        time.sleep(0.2)
