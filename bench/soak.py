"""Mixed traffic for a long time (text, new and known images, aborts); then checks that memory has not grown and the engine is idle.

    python -m bench.soak --url http://127.0.0.1:8000 --minutes 30 --pid LAUNCHER

A tenth of the requests is aborted. With `--traffic changed-image` each request has the same image with a few changed pixels, which is
new to all caches (the load of vLLM's issue 35191), and none is aborted.

Memory is each process's private memory. The warm-up is the first third of the time; growth compares the medians of the sixth after it and
of the last sixth. An idle engine checks its own state and exits if it is inconsistent.
"""

import argparse
import asyncio
import io
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import uvloop
from PIL import Image

from bench.client import ChatClient, chat_body, text_of, user_message
from bench.pictures import QUALITY, data_uri, make_jpeg, make_jpegs
from bench.processes import own_memory, roles_of
from bench.report import table, write_result

NUM_KNOWN = 32
SAMPLE_S = 2.0
REST_S = 5.0
NUM_SHOWN = 12
RESOLUTIONS = ("720p", "1080p")
CHANGED_SIDE = 3  # pixels


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--traffic", choices=sorted(TRAFFIC), default="mixed")
    parser.add_argument("--pid", type=int, required=True, help="the launcher, on this machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    return parser.parse_args(argv)


class Traffic(ABC):
    """Requests of one kind, and how they ended."""

    aborted_part = 0.0

    def __init__(self, client: ChatClient, model: str, seed: int):
        self.ends: Counter[str] = Counter()
        self._client = client
        self._model = model
        self._rng = random.Random(seed)

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Of the next request."""

    async def client(self, end: float) -> None:
        """One client, until it is that late."""
        while time.monotonic() < end:
            request = asyncio.create_task(self._client.chat(self.body()))
            if self._rng.random() < self.aborted_part:
                await asyncio.sleep(self._rng.random())
                request.cancel()
            try:
                answer = await request
                self.ends["served" if answer.error is None else answer.error[:40]] += 1
            except asyncio.CancelledError:
                self.ends["aborted"] += 1


class Mixed(Traffic):
    """Text, new and known images, one and several."""

    aborted_part = 0.1

    def __init__(self, client: ChatClient, model: str, seed: int):
        super().__init__(client, model, seed)
        self._known = {name: [data_uri(jpeg) for jpeg in make_jpegs(seed, NUM_KNOWN, name, "smooth")] for name in RESOLUTIONS}
        self._number = 0

    def body(self) -> dict[str, Any]:
        self._number += 1
        images = [self._rng.choice(self._known[self._rng.choice(RESOLUTIONS)]) for _ in range(self._rng.choice((0, 0, 1, 1, 2, 4)))]
        if images and self._rng.random() < 0.3:
            images[0] = data_uri(make_jpegs(1000 + self._number, 1, "720p", "smooth")[0])
        text = text_of(self._rng.choice((16, 64, 400)), self._rng.randrange(200))
        return chat_body(self._model, [user_message(images, text)], self._rng.choice((1, 16, 64)))


class ChangedImage(Traffic):
    """The same image in each request, with a few changed pixels."""

    def __init__(self, client: ChatClient, model: str, seed: int):
        super().__init__(client, model, seed)
        self._pixels = np.asarray(Image.open(io.BytesIO(make_jpeg(seed, "720p", "smooth"))))

    def body(self) -> dict[str, Any]:
        pixels, side = self._pixels.copy(), CHANGED_SIDE
        y, x = (self._rng.randrange(size - side) for size in pixels.shape[:2])
        pixels[y : y + side, x : x + side] = [self._rng.randrange(256) for _ in range(3)]
        jpeg = io.BytesIO()
        Image.fromarray(pixels).save(jpeg, "JPEG", quality=QUALITY["smooth"])
        return chat_body(self._model, [user_message([data_uri(jpeg.getvalue())], text_of(32, 0))], 32)


TRAFFIC: dict[str, type[Traffic]] = {"mixed": Mixed, "changed-image": ChangedImage}


async def sample_memory(pid: int, samples: dict[str, list[int]]) -> None:
    """For ever."""
    while True:
        for role, child in roles_of(pid).items():
            samples.setdefault(role, []).append(own_memory(child))
        await asyncio.sleep(SAMPLE_S)


def growth(values: list[int]) -> float:
    """Growth in percent, as defined above."""
    sixth = max(1, len(values) // 6)
    return 100 * (median(values[-sixth:]) / median(values[2 * sixth : 3 * sixth]) - 1)


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run as numbers."""
    samples: dict[str, list[int]] = {}
    async with ChatClient(args.url) as client:
        traffic = TRAFFIC[args.traffic](client, await client.model(), args.seed)
        end = time.monotonic() + 60 * args.minutes
        sampler = asyncio.create_task(sample_memory(args.pid, samples))
        await asyncio.gather(*(traffic.client(end) for _ in range(args.concurrency)))
        sampler.cancel()
    await asyncio.sleep(REST_S)
    async with aiohttp.ClientSession() as session, session.get(f"{args.url}/health") as health, session.get(f"{args.url}/load") as load:
        rest = {"health": health.status, "open": (await load.json())["server_load"]}
    memory = {
        role: {"growth_percent": round(growth(values), 2), "mib": [value >> 20 for value in values[:: max(1, len(values) // NUM_SHOWN)]]}
        for role, values in samples.items()
    }
    return {"minutes": args.minutes, "ends": dict(traffic.ends), "at_rest": rest, **memory}


def main() -> None:
    """Entry point."""
    args = parse_args()
    result = uvloop.run(soak(args))
    print(table(["", "value"], [[name, str(value)] for name, value in result.items()]))
    write_result(args, result=result)


if __name__ == "__main__":
    main()
