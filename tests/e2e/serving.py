"""Start the real engine for a test and check that nothing of it is left: `with serve(folder, flags) as engine`."""

import base64
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from tests.eventually import HANG_GUARD_S, eventually

ROOT = Path(__file__).parents[2]
SMALL = ["--api-arena-bytes", "64M", "--processor-arena-bytes", "64M", "--kv-cache-memory-bytes", "64M"]


class Engine:
    def __init__(self, model: str | Path, flags: list[str], sizes: Sequence[str] = SMALL, prefix: Sequence[str] = ()):
        self.log_path = Path(tempfile.mkstemp(prefix="engine-test-", suffix=".log")[1])
        command = [*prefix, sys.executable, "-m", "engine.serve", "--model", str(model), "--port", "0", *sizes, *flags]
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        self.url = self._await_ready()
        self.children = children_of(self.process.pid)
        self.run_dir = run_dir_of(self.children[0])
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def chat(self, content: object, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=chat_body(content, **fields))

    def text(self, content: object, **fields: Any) -> str:
        response = self.chat(content, **fields)
        assert response.status_code == 200, response.text
        answer = response.json()["choices"][0]["message"]["content"]
        return answer

    def stream(self, content: object, **fields: Any) -> list[dict[str, Any]]:
        body = chat_body(content, stream=True, **fields)
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metric(self, name: str) -> float:
        """Return a metric, summed over its labels. Its value may be a second old."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        text = self.client.get("/metrics").text
        found = [re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE) for name in names]
        assert all(found), f"not all of these are metrics: {names}"
        return [sum(map(float, values)) for values in found]

    def log(self) -> str:
        return self.log_path.read_text()

    def stop(self) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(HANG_GUARD_S)
        assert code == 0, f"exit code {code}\n{self.log()[-4000:]}"
        assert "Traceback" not in self.log(), self.log()[-4000:]
        self.assert_gone()

    def pid_of(self, role: str) -> int:
        return next(pid for pid in self.children if role_of(pid) == role)

    def assert_gone(self) -> None:
        eventually(lambda: not any(is_alive(pid) for pid in self.children), "the end of all processes")
        eventually(lambda: not self.run_dir.exists(), "the removal of the run directory")

    def kill(self) -> None:
        for pid in [*self.children, self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def _await_ready(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.search(r"ready after .*: (http://\S+) serves", line):
                return match.group(1)
        self.process.wait()
        log = self.log()
        self.log_path.unlink()
        raise AssertionError(f"the engine did not start\n{log[-6000:]}")


class Counted:
    """The growth of an engine's totals inside a `with` block, whose begin and end wait for those of an idle engine."""

    NAMES = ("steps", "computed_tokens", "images_encoded", "images_skipped", "images_decoded")

    def __init__(self, engine: Engine):
        self._engine = engine

    def __enter__(self) -> "Counted":
        steps = self._read()["steps"]
        self._engine.text("Hello", max_tokens=1)
        self._before = self._read_after(steps)
        return self

    def __exit__(self, *_: object) -> None:
        self.grown = {name: value - self._before[name] for name, value in self._read_after(self._before["steps"]).items()}

    def _read(self) -> dict[str, float]:
        return dict(zip(self.NAMES, self._engine.metrics(*(f"engine_{name}_total" for name in self.NAMES)), strict=True))

    def _read_after(self, steps: float) -> dict[str, float]:
        metric = self._engine.metric
        eventually(lambda: metric("engine_steps_total") > steps and not metric("vllm:num_requests_running"), "totals of the last step")
        return self._read()


class LongAnswer:
    """A client that streams an answer in a thread and has begun. `outcome`: "" while it runs, then "whole", "error" or "broken"."""

    def __init__(self, url: str, num_tokens: int = 4000, guard_s: float = HANG_GUARD_S, **headers: str):
        self.outcome = ""
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url, num_tokens, headers))
        self._thread.start()
        assert self._begun.wait(guard_s)

    def join(self) -> str:
        self._thread.join()
        return self.outcome

    def _read(self, url: str, num_tokens: int, headers: dict[str, str]) -> None:
        body = chat_body("go on", max_tokens=num_tokens, ignore_eos=True, stream=True)
        lines = [""]
        outcome = "broken"
        try:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=90) as response:
                for line in response.iter_lines():
                    lines += [line] if line else []
                    self._begun.set()
            is_whole = lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2]
            outcome = "whole" if is_whole else "error" if any('"error"' in line for line in lines) else outcome
        except httpx.HTTPError:
            outcome = "error" if any('"error"' in line for line in lines) else outcome
        finally:
            self.outcome = outcome
            self._begun.set()


@contextlib.contextmanager
def serve(model: str | Path, *flags: str, is_small: bool = True) -> Iterator[Engine]:
    """Run an engine; at the end it is stopped and checked to be gone. `is_small`: with little memory."""
    engine = Engine(model, list(flags), SMALL if is_small else ())
    try:
        yield engine
    except BaseException:
        engine.kill()
        sys.stderr.write(engine.log()[-6000:])
        raise
    engine.stop()
    engine.log_path.unlink()


@contextlib.contextmanager
def doomed(model: str | Path, *flags: str, prefix: Sequence[str] = ()) -> Iterator[Engine]:
    engine = Engine(model, list(flags), SMALL, prefix)
    try:
        yield engine
    except BaseException:
        sys.stderr.write(engine.log()[-6000:])
        raise
    finally:
        engine.kill()
    engine.log_path.unlink()


def chat_body(content: object, **fields: Any) -> dict[str, Any]:
    messages = fields.pop("messages", None) or [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}


def picture(seed: int, height: int, width: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def data_uri(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def image_part(image: Image.Image, kind: str = "PNG", **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(image, kind, **options)}}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def role_of(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    module = command[command.index(b"-m") + 1].decode()
    return {"server.api.main": "api", "server.processor.main": "processor", "engine.scheduler.main": "scheduler"}.get(module, "worker")


def run_dir_of(pid: int) -> Path:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return Path(command[command.index(b"-m") + 2].decode()).parent


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
