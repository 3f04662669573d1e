"""`--dp 2`: one command, two engines behind the affinity proxy; any of its processes may die."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import Engine, chat_body, children_of, image_part, is_alive, picture, role_of, run_dir_of, text_part

pytestmark = pytest.mark.faults

DEADLINE_S = 20
RESTART_S = 90
HEARD_S = 5  # until a client hears of a death: a tenth of a second, two on a machine that does much else
CPUS = sorted(os.sched_getaffinity(0))


class Fleet(Engine):
    """A running `--dp 2`. `children` are the engines, their processes and the proxy; `engines` are in the order of their numbers."""

    def __init__(self, model: Path, *flags: str):
        super().__init__(model, ["--dp", "2", *flags])
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in self.children}
        self.proxy = next(pid for pid, command in commands.items() if "server.route" in command)
        self.engines = sorted((pid for pid in commands if pid != self.proxy), key=lambda pid: commands[pid][-2])
        self.settings = [json.loads(Path(f"/proc/{pid}/fd/{commands[pid][-2].split('/')[-1]}").read_text()) for pid in self.engines]
        self.run_dir = run_dir_of(children_of(self.engines[0])[0])
        self.children += [child for pid in self.engines for child in children_of(pid)]

    def backends(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = self.client.get("/health").json()["backends"]
        return found

    def until_healthy(self, count: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while sum(bool(backend["healthy"]) for backend in self.backends()) != count:
            assert time.monotonic() < deadline, self.log()[-3000:]
            time.sleep(0.1)


@pytest.fixture(scope="module")
def fleet(tiny: Path) -> Iterator[Fleet]:
    running = Fleet(tiny)
    try:
        yield running
    except BaseException:
        running.kill()
        raise
    if running.process.poll() is None:
        running.stop()
    running.log_path.unlink()


def test_engines_share_the_host(fleet: Fleet) -> None:
    """Red if each engine takes the whole machine: its CPUs, and with them the threads of its pools and of torch."""
    shares = [os.sched_getaffinity(child) for pid in fleet.engines for child in (pid, *children_of(pid))]
    assert shares[0].isdisjoint(shares[-1]) or len(CPUS) == 1
    assert shares[0] | shares[-1] == set(CPUS)
    assert all(share in (shares[0], shares[-1]) for share in shares)
    settings = [dict(settings) for settings in fleet.settings]
    assert settings[0].pop("port") != settings[1].pop("port") and settings[0] == settings[1]
    assert settings[0]["api-arena-bytes"] == 64 << 20 and "media-pool-size" not in settings[0]


def test_a_conversation_stays_and_its_image_is_encoded_once(fleet: Fleet) -> None:
    """Red if requests about one image reach both engines, or if all images go to one of them, or answers differ between engines."""
    images = [image_part(picture(seed, 64, 64)) for seed in range(8)]
    before = [backend["num_taken"] for backend in fleet.backends()]
    asked: list[dict[str, object]] = [chat_body([image, text_part(f"Question {turn}")]) for image in images for turn in range(3)]
    texts = []
    for body in asked:
        response = fleet.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        texts.append(response.json()["choices"][0]["message"])
    taken = [int(str(backend["num_taken"])) - int(str(old)) for backend, old in zip(fleet.backends(), before, strict=True)]
    assert taken == [12, 12]
    urls = [str(backend["url"]) for backend in fleet.backends()]
    encoded = 0.0
    deadline = time.monotonic() + DEADLINE_S
    while encoded != 8:
        assert time.monotonic() < deadline, f"{encoded} images were encoded"
        text = "".join(httpx.get(f"{url}/metrics").text for url in urls)
        encoded = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("engine_images_encoded_total{"))
        time.sleep(0.1)
    for url in urls:
        direct = [httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"] for body in asked]
        assert direct == texts


def ask_for_long(url: str, body: dict[str, object], ended: dict[str, float], begun: threading.Event | None = None) -> None:
    """Streams until an error, and notes when that came."""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if begun is not None:
                begun.set()
            if '"error"' in line:
                ended["error"] = time.monotonic()
            elif line == "data: [DONE]":
                ended["whole"] = time.monotonic()


def test_an_engine_that_dies_is_started_again_and_the_other_serves_on(fleet: Fleet) -> None:
    """Red if a death is not said, reaches clients of the other engine, leaves its own waiting, or lasts."""
    fleet.until_healthy(2, RESTART_S)
    ended: list[dict[str, float]] = [{}, {}]
    before = [int(str(backend["num_taken"])) for backend in fleet.backends()]
    clients = []
    for index in range(2):  # without a key: the one with fewer requests takes it
        body = chat_body("go on", max_tokens=2000 if index == 0 else 500, ignore_eos=True, stream=True)
        clients.append(threading.Thread(target=ask_for_long, args=(fleet.url, body, ended[index])))
        clients[-1].start()
        while sum(int(str(backend["num_in_flight"])) for backend in fleet.backends()) != index + 1:
            time.sleep(0.01)
    first = next(i for i, (backend, old) in enumerate(zip(fleet.backends(), before, strict=True)) if backend["num_in_flight"])
    taken = [int(str(backend["num_taken"])) - old for backend, old in zip(fleet.backends(), before, strict=True)]
    assert taken == [1, 1]
    killed = time.monotonic()
    os.kill(next(pid for pid in children_of(fleet.engines[first]) if role_of(pid) == "worker"), signal.SIGKILL)
    for client in clients:
        client.join(RESTART_S)  # one is answered beside the other engine's start
    errors = [index for index in range(2) if "error" in ended[index]]
    assert len(errors) == 1 and "whole" in ended[1 - errors[0]]
    assert ended[errors[0]]["error"] - killed < HEARD_S
    for seed in range(4):
        assert fleet.chat([image_part(picture(seed, 64, 64)), text_part("And now?")]).status_code == 200
    fleet.until_healthy(2, RESTART_S)
    log = fleet.log()
    assert f"engine {first} ended with code 1: 1 of 2 serve on; it is started again in 1 s" in log
    assert f"engine {first} serves again" in log
    assert fleet.client.get("/health").status_code == 200
    new = [pid for pid in children_of(fleet.process.pid) if pid != fleet.proxy and is_alive(pid)]
    assert len(new) == 2 and fleet.engines[first] not in new
    fleet.children += [*new, *(child for pid in new for child in children_of(pid))]


def test_a_stop_lets_running_requests_end(fleet: Fleet) -> None:
    """Red if SIGTERM cuts a stream behind the proxy, or takes new requests meanwhile. Ends the fleet that the tests above have used."""
    fleet.until_healthy(2, RESTART_S)
    ended: dict[str, float] = {}
    begun = threading.Event()  # an engine has it: what is on its way from the proxy to an engine that stops is refused
    body = chat_body("go on", max_tokens=500, ignore_eos=True, stream=True)
    client = threading.Thread(target=ask_for_long, args=(fleet.url, body, ended, begun))
    client.start()
    assert begun.wait(DEADLINE_S)
    fleet.process.send_signal(signal.SIGTERM)
    while not ended and fleet.client.get("/health").status_code != 503:
        time.sleep(0.01)
    if not ended:
        assert fleet.chat("Hello").status_code == 503
    client.join(DEADLINE_S)
    assert "whole" in ended and fleet.process.wait(DEADLINE_S) == 0
    fleet.client.close()
    fleet.assert_gone()
    assert "Traceback" not in fleet.log()


@pytest.mark.parametrize("victim", ["proxy", "both engines", "launcher"])
def test_the_whole_ends_when_nobody_can_be_served(tiny: Path, victim: str) -> None:
    """Red if a launcher that serves nobody looks alive, if it exits with 0, or if anything is left of it."""
    running = Fleet(tiny)
    try:
        targets = {"proxy": [running.proxy], "both engines": running.engines, "launcher": [running.process.pid]}[victim]
        for pid in targets:
            os.kill(pid, signal.SIGKILL)
        code = running.process.wait(DEADLINE_S)
        running.client.close()
        if victim != "launcher":
            running.assert_gone(DEADLINE_S)
            assert code == 1
            said = {"proxy": "the proxy was killed (SIGKILL", "both engines": "and no other is left"}[victim]
            assert said in running.log() and "Traceback" not in running.log()
        deadline = time.monotonic() + DEADLINE_S
        while any(is_alive(pid) for pid in running.children):
            assert time.monotonic() < deadline, "processes are left"
            time.sleep(0.05)
    finally:
        running.kill()
    running.log_path.unlink()


def test_what_cannot_start_ends_at_once(tiny: Path) -> None:
    """Red if an engine that never ran is started again and again."""
    with pytest.raises(AssertionError, match=r"the engine did not start(.|\n)*engine \d did not start: it ended with code 2"):
        Fleet(tiny, "--max-model-len", "99999999")
