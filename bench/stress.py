"""Mixed traffic for a long time: dialects, texts, new and known images, structured output, streams, and clients that disconnect.

    python -m bench stress --duration 150 --concurrency 48 --pid LAUNCHER
    python -m bench stress --duration 1800 --concurrency 8 --traffic changed-image --pid LAUNCHER

`changed-image` sends the same image with a few changed pixels, so that no cache has it, in every request (the load of vLLM's issue
35191). The output shows how requests ended, the blocks that are free at the end, the latency of `/health`, and the private memory of each
process: its growth compares the medians of the third and the last sixth of the time.
"""

import argparse
import asyncio
import io
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import uvloop
from PIL import Image

from bench.client import text_of, user_message, watch_health
from bench.flags import make_parser
from bench.pictures import QUALITY, RESOLUTIONS, data_uri, make_jpeg
from bench.processes import memory_mib
from bench.report import percentile, table, write_result

NUM_KNOWN = 16
LEFT_PART = 0.15  # share of requests whose client disconnects
CHANGED_SIDE = 3  # pixels
SAMPLE_S = 2.0
IDLE_S = 60.0  # until the engine is idle
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}

Request = tuple[str, dict[str, Any]]  # path, body


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("stress", __doc__, "url", "duration", "pid", "seed", "json", duration=150.0)
    parser.add_argument("--traffic", choices=("mixed", "changed-image"), default="mixed")
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--resolution", choices=sorted(RESOLUTIONS), default="720p")
    return parser.parse_args(argv)


class Mixture:
    """Generator of requests of random kinds."""

    def __init__(self, resolution: str, seed: int):
        self.rng = random.Random(seed)
        self._resolution, self._numbers = resolution, itertools.count(1000)
        self._known = [data_uri(make_jpeg(number, resolution, "smooth")) for number in range(NUM_KNOWN)]
        self._kinds: tuple[Callable[[], Request], ...] = (
            self._chat,
            self._chat,
            self._structured,
            self._completion,
            self._response,
            self._message,
        )

    def next(self) -> tuple[str, dict[str, Any]]:
        path, body = self.rng.choice(self._kinds)()
        return path, {**body, "stream": self.rng.random() < 0.5}

    def _text(self) -> str:
        return text_of(self.rng.choice((16, 64, 400)), self.rng.randrange(200))

    def _images(self) -> list[str]:
        images = self.rng.sample(self._known, self.rng.choice((0, 1, 1, 2, 4)))
        if images and self.rng.random() < 0.4:
            images[0] = data_uri(make_jpeg(next(self._numbers), self._resolution, "smooth"))
        return images

    def _chat(self) -> Request:
        extras = self.rng.choice(({}, {"logprobs": True, "top_logprobs": 5}, {"n": 2, "temperature": 1.0}, {"stop": ["e"]}))
        body = {"messages": [user_message(self._images(), self._text())], "max_tokens": self.rng.choice((1, 16, 64))}
        return "/v1/chat/completions", body | extras

    def _structured(self) -> Request:
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        return "/v1/chat/completions", {"messages": [user_message([], self._text())], "max_tokens": 48, "response_format": form}

    def _completion(self) -> Request:
        return "/v1/completions", {"prompt": [self._text() for _ in range(self.rng.choice((1, 4)))], "max_tokens": 32}

    def _response(self) -> Request:
        parts = [{"type": "input_text", "text": self._text()}, *({"type": "input_image", "image_url": uri} for uri in self._images())]
        return "/v1/responses", {"input": [{"role": "user", "content": parts}], "max_output_tokens": 32, "store": False}

    def _message(self) -> Request:
        sources = ({"type": "base64", "media_type": "image/jpeg", "data": uri.partition(",")[2]} for uri in self._images())
        parts = [*({"type": "image", "source": source} for source in sources), {"type": "text", "text": self._text()}]
        return "/v1/messages", {"messages": [{"role": "user", "content": parts}], "max_tokens": 32}


async def client(session: aiohttp.ClientSession, model: str, mixture: Mixture, end: float, ends: Counter[str]) -> None:
    """Run one client until the given time."""
    while time.monotonic() < end:
        path, body = mixture.next()
        leaves = mixture.rng.random() < LEFT_PART
        try:
            async with asyncio.timeout(3 * mixture.rng.random() if leaves else None):
                async with session.post(path, json={"model": model, **body}) as answer:
                    text = await answer.text()
                    is_whole = answer.status == 200 and '"error":{' not in text.replace(" ", "")
                    ends["answered" if is_whole else f"{path}: {answer.status}: {text[:120]}"] += 1
        except TimeoutError:
            ends["left"] += 1
        except aiohttp.ClientError as error:
            ends[f"{path}: {type(error).__name__}"] += 1


class ChangedImage(Mixture):
    """The same image in each request, with a few changed pixels."""

    def __init__(self, resolution: str, seed: int):
        super().__init__(resolution, seed)
        self._pixels = np.asarray(Image.open(io.BytesIO(make_jpeg(seed, resolution, "smooth"))))

    def next(self) -> Request:
        pixels, side = self._pixels.copy(), CHANGED_SIDE
        y, x = (self.rng.randrange(size - side) for size in pixels.shape[:2])
        pixels[y : y + side, x : x + side] = [self.rng.randrange(256) for _ in range(3)]
        jpeg = io.BytesIO()
        Image.fromarray(pixels).save(jpeg, "JPEG", quality=QUALITY["smooth"])
        content = [user_message([data_uri(jpeg.getvalue())], text_of(32, 0))]
        return "/v1/chat/completions", {"messages": content, "max_tokens": 32, "stream": True}


async def sample_memory(pid: int | None, samples: dict[str, list[int]]) -> None:
    """Append the memory of each role until the task is cancelled."""
    while True:
        for role, size in memory_mib(pid).items():
            samples.setdefault(role, []).append(size)
        await asyncio.sleep(SAMPLE_S)


def growth(values: list[int]) -> float:
    """Growth in percent between the third and the last sixth of the samples."""
    sixth = max(1, len(values) // 6)
    return round(100 * (median(values[-sixth:]) / median(values[2 * sixth : 3 * sixth] or values) - 1), 2)


async def at_rest(session: aiohttp.ClientSession) -> dict[str, float]:
    """Return the blocks once all requests have ended and they are free, or after IDLE_S."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "engine_num_free_blocks", "engine_num_blocks")
    for _ in range(int(IDLE_S)):
        async with session.get("/metrics") as answer:
            text = await answer.text()
        found = {name: sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))) for name in names}
        if found[names[0]] + found[names[1]] == 0 and found[names[2]] == found[names[3]]:
            break
        await asyncio.sleep(1)
    return found


async def stress(args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a run."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(args.url, connector=connector, timeout=aiohttp.ClientTimeout(total=3600)) as session:
        async with session.get("/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        kind = ChangedImage if args.traffic == "changed-image" else Mixture
        mixture, ends, health, samples = kind(args.resolution, args.seed), Counter[str](), list[float](), dict[str, list[int]]()
        watchers = [asyncio.create_task(watch_health(args.url, health)), asyncio.create_task(sample_memory(args.pid, samples))]
        end = time.monotonic() + args.duration
        await asyncio.gather(*(client(session, model, mixture, end, ends) for _ in range(args.concurrency)))
        for watcher in watchers:
            assert not watcher.done(), watcher.exception()
            watcher.cancel()
        rest = await at_rest(session)
    quantiles = {"p50": percentile(health, 50), "p99": percentile(health, 99), "max": max(health)}
    return {
        "answered": ends.pop("answered", 0),
        "left": ends.pop("left", 0),
        "errors": dict(ends),
        "at_rest": rest,
        "health_ms": {name: round(1e3 * value, 1) for name, value in quantiles.items()},
        "memory_mib": {role: [values[0], values[-1]] for role, values in samples.items()},
        "growth_percent": {role: growth(values) for role, values in samples.items()},
    }


def main() -> None:
    """Entry point."""
    args = parse_args()
    result = uvloop.run(stress(args))
    print(table(["", "value"], [[name, str(value)] for name, value in result.items()]))
    write_result(args, result=result)


if __name__ == "__main__":
    main()
