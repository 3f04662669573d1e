"""Mixed traffic for a long time: dialects, texts, new and known images, structured output, streams, and clients that disconnect.

    python -m bench stress --duration 150 --concurrency 48 --pid LAUNCHER

The output shows how requests ended, the blocks that are free at the end, the latency of `/health`, and the private memory of each
process: its growth compares the medians of the third and the last sixth of the time.
"""

import argparse
import asyncio
import itertools
import random
import time
from collections import Counter
from statistics import median
from typing import Any

import aiohttp
import uvloop

from bench.client import ChatClient, text_of, user_message, watch_health
from bench.flags import make_parser
from bench.pictures import data_uri, make_jpeg, make_uris
from bench.processes import memory_mib
from bench.report import percentiles_ms, table, write_result

NUM_KNOWN = 16
LEFT_PART = 0.15  # share of requests whose client disconnects
SAMPLE_S = 2.0
IDLE_S = 60  # until the engine is idle
WAITING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
BLOCKS = ("engine_num_free_blocks", "engine_num_blocks")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
FORM: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}, "max_tokens": 48}
EXTRAS: tuple[dict[str, Any], ...] = ({}, {"logprobs": True, "top_logprobs": 5}, {"n": 2, "temperature": 1.0}, {"stop": ["e"]})

Request = tuple[str, dict[str, Any]]  # path, body


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    common = ("url", "duration", "pid", "seed", "json", "concurrency", "resolution")
    return make_parser("stress", __doc__, *common, duration=150.0, concurrency=48).parse_args(argv)


class Mixture:
    def __init__(self, resolution: str, seed: int):
        self.rng = random.Random(seed)
        self._resolution, self._numbers = resolution, itertools.count(1000)
        self._known = make_uris(0, NUM_KNOWN, resolution, "smooth")

    def next(self) -> Request:
        choice = self.rng.choice
        text = text_of(choice((16, 64, 400)), self.rng.randrange(200))
        body: dict[str, Any]
        match choice(("chat", "chat", "structured", "completion", "response", "message")):
            case "chat":
                body = {"messages": [user_message(self._images(), text)], "max_tokens": choice((1, 16, 64))}
                path, body = "chat/completions", body | choice(EXTRAS)
            case "structured":
                path, body = "chat/completions", {"messages": [user_message([], text)], **FORM}
            case "completion":
                path, body = "completions", {"prompt": [f"{i} {text}" for i in range(choice((1, 4)))], "max_tokens": 32}
            case "response":
                pictures = [{"type": "input_image", "image_url": uri} for uri in self._images()]
                content = [{"type": "input_text", "text": text}, *pictures]
                path, body = "responses", {"input": [{"role": "user", "content": content}], "max_output_tokens": 32, "store": False}
            case _:
                sources = ({"type": "base64", "media_type": "image/jpeg", "data": uri.partition(",")[2]} for uri in self._images())
                parts = [*({"type": "image", "source": source} for source in sources), {"type": "text", "text": text}]
                path, body = "messages", {"messages": [{"role": "user", "content": parts}], "max_tokens": 32}
        return f"v1/{path}", {**body, "stream": self.rng.random() < 0.5}

    def _images(self) -> list[str]:
        images = self.rng.sample(self._known, self.rng.choice((0, 1, 1, 2, 4)))
        if images and self.rng.random() < 0.4:
            images[0] = data_uri(make_jpeg(next(self._numbers), self._resolution, "smooth"))
        return images


async def client(server: ChatClient, model: str, traffic: Mixture, end: float, ends: Counter[str]) -> None:
    while time.monotonic() < end:
        path, body = traffic.next()
        leaves = traffic.rng.random() < LEFT_PART
        try:
            async with asyncio.timeout(3 * traffic.rng.random() if leaves else None):
                async with server.session.post(path, json={"model": model, **body}) as answer:
                    text = await answer.text()
                    is_whole = answer.status == 200 and '"error":{' not in text.replace(" ", "")
                    ends["answered" if is_whole else f"{path}: {answer.status}: {text[:120]}"] += 1
        except TimeoutError:
            ends["left"] += 1
        except aiohttp.ClientError as error:
            ends[f"{path}: {type(error).__name__}"] += 1


async def sample_memory(pid: int | None, samples: dict[str, list[int]]) -> None:
    while True:
        for role, size in memory_mib(pid).items():
            samples.setdefault(role, []).append(size)
        await asyncio.sleep(SAMPLE_S)


def growth(values: list[int]) -> float:
    sixth = max(1, len(values) // 6)
    return round(100 * (median(values[-sixth:]) / median(values[2 * sixth : 3 * sixth] or values) - 1), 2)


async def at_rest(server: ChatClient) -> dict[str, float]:
    """Return the numbers of requests and blocks once all requests have ended and all blocks are free, or after IDLE_S."""
    for _ in range(IDLE_S):
        found = await server.metrics(*WAITING, *BLOCKS)
        if not any(found[name] for name in WAITING) and len({found[name] for name in BLOCKS}) == 1:
            break
        await asyncio.sleep(1)
    return found


async def stress(args: argparse.Namespace) -> dict[str, Any]:
    async with ChatClient(args.url) as server:
        model, traffic = await server.model(), Mixture(args.resolution, args.seed)
        ends, health, samples = Counter[str](), list[float](), dict[str, list[int]]()
        watchers = [asyncio.create_task(watch_health(args.url, health)), asyncio.create_task(sample_memory(args.pid, samples))]
        end = time.monotonic() + args.duration
        await asyncio.gather(*(client(server, model, traffic, end, ends) for _ in range(args.concurrency)))
        for watcher in watchers:
            assert not watcher.done(), watcher.exception()
            watcher.cancel()
        rest = await at_rest(server)
    return {
        "answered": ends.pop("answered", 0),
        "left": ends.pop("left", 0),
        "errors": dict(ends),
        "at_rest": rest,
        "health_ms": percentiles_ms(health, 100),
        "memory_mib": {role: [values[0], values[-1]] for role, values in samples.items()},
        "growth_percent": {role: growth(values) for role, values in samples.items()},
    }


def main() -> None:
    args = parse_args()
    result = uvloop.run(stress(args))
    print(table(["", "value"], list(result.items())))
    write_result(args, result=result)
