"""`--dp 2`: one command runs two engines and the affinity proxy; any of its processes may die."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import Engine, LongAnswer, children_of, image_part, is_alive, picture, role_of, run_dir_of, text_part
from tests.eventually import HANG_GUARD_S, eventually

pytestmark = pytest.mark.faults


def port_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_bytes().partition(b"ENGINE_PORT=")[2].partition(b"\0")[0].decode()


class Fleet(Engine):
    """A running `--dp 2`. `children` are the engines, their processes and the proxy; `engines` are in the order of their numbers."""

    def __init__(self, model: Path, *flags: str):
        super().__init__(model, ["--dp", "2", *flags])
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in self.children}
        self.proxy = next(pid for pid, command in commands.items() if "server.proxy" in command)
        urls = " ".join(commands[self.proxy])  # in the order of engines, unlike their ports
        self.engines = sorted((pid for pid in commands if pid != self.proxy), key=lambda pid: urls.index(f"127.0.0.1:{port_of(pid)}"))
        self.run_dir = run_dir_of(children_of(self.engines[0])[0])
        self.children += [child for pid in self.engines for child in children_of(pid)]

    def backends(self) -> list[dict[str, object]]:
        found = self.client.get("/health").json()["backends"]
        return found

    def numbers(self, name: str) -> list[int]:
        return [int(str(backend[name])) for backend in self.backends()]

    def until_healthy(self, count: int) -> None:
        eventually(lambda: sum(bool(backend["healthy"]) for backend in self.backends()) == count, f"{count} healthy engines")


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


def test_an_engine_that_dies_is_started_again_and_the_other_serves_on(fleet: Fleet) -> None:
    fleet.until_healthy(2)
    soft, hard = resource.prlimit(fleet.proxy, resource.RLIMIT_NOFILE)
    assert soft == hard, "few clients find a place"
    before = fleet.numbers("num_taken")
    answers = [LongAnswer(fleet.url, num_tokens=2000)]  # without a key: the engine with fewer requests takes it
    first = fleet.numbers("num_in_flight").index(1)
    answers.append(LongAnswer(fleet.url, num_tokens=500))
    assert [new - old for new, old in zip(fleet.numbers("num_taken"), before, strict=True)] == [1, 1]
    os.kill(next(pid for pid in children_of(fleet.engines[first]) if role_of(pid) == "worker"), signal.SIGKILL)
    assert answers[0].join() == "error"
    assert "is serving again" not in fleet.log(), "its client has the error before the restart"
    assert answers[1].join() == "whole", "the other one is answered during the restart"
    for seed in range(4):
        assert fleet.chat([image_part(picture(seed, 64, 64)), text_part("And now?")]).status_code == 200
    fleet.until_healthy(2)
    eventually(lambda: f"engine {first} is serving again" in fleet.log(), "the launcher's line, which may follow the proxy's")
    assert f"engine {first}: the engine ended with code 1; restarting it in 5 s" in fleet.log()
    assert fleet.client.get("/health").status_code == 200
    new = [pid for pid in children_of(fleet.process.pid) if pid != fleet.proxy and is_alive(pid)]
    assert len(new) == 2 and fleet.engines[first] not in new
    fleet.children += [*new, *(child for pid in new for child in children_of(pid))]


def test_a_stop_lets_running_requests_end(fleet: Fleet) -> None:
    """Ends the fleet of the tests above."""
    fleet.until_healthy(2)
    answer = LongAnswer(fleet.url, num_tokens=500)  # has begun: a request between the proxy and a stopping engine is refused
    fleet.process.send_signal(signal.SIGTERM)
    eventually(lambda: answer.outcome or fleet.client.get("/health").status_code == 503, "an unhealthy fleet")
    if not answer.outcome:
        assert fleet.chat("Hello").status_code == 503
    assert answer.join() == "whole" and fleet.process.wait(HANG_GUARD_S) == 0
    fleet.client.close()
    fleet.assert_gone()
    assert "Traceback" not in fleet.log()


def test_a_second_signal_ends_running_requests(tiny: Path) -> None:
    running = Fleet(tiny, "--max-model-len", "4200", "--shutdown-timeout", "3600")
    try:
        answer = LongAnswer(running.url)
        running.process.send_signal(signal.SIGTERM)
        eventually(lambda: answer.outcome or running.client.get("/health").status_code == 503, "an unhealthy fleet")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(HANG_GUARD_S) == 0
        running.client.close()
        eventually(lambda: not any(is_alive(pid) for pid in running.children), "the end of all processes")
        assert answer.join() != "whole"
    finally:
        running.kill()
    running.log_path.unlink()


@pytest.mark.parametrize("victim", ["proxy", "both engines", "launcher"])
def test_the_launcher_ends_when_no_engine_is_left(tiny: Path, victim: str) -> None:
    running = Fleet(tiny)
    try:
        targets = {"proxy": [running.proxy], "both engines": running.engines, "launcher": [running.process.pid]}[victim]
        for pid in targets:
            os.kill(pid, signal.SIGKILL)
        code = running.process.wait(HANG_GUARD_S)
        running.client.close()
        if victim != "launcher":
            running.assert_gone()
            assert code == 1
            said = {"proxy": "the proxy was killed (SIGKILL", "both engines": "and no other is left"}[victim]
            assert said in running.log() and "Traceback" not in running.log()
        eventually(lambda: not any(is_alive(pid) for pid in running.children), "the end of all processes")
    finally:
        running.kill()
    running.log_path.unlink()
