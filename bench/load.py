"""Many concurrent clients: requests per second, and percentiles of TTFT, time per output token, inter-token latency and end-to-end time.

    python -m bench load --url http://127.0.0.1:8000 --concurrency 32 --requests 128 --images 1 --input-tokens 256 --output-tokens 128

Every request has new images and different random words, and samples at temperature 1: equal tokens would choose the same experts. A client
sends its next request after the previous answer. `--rate` sends at a fixed rate instead: several times the capacity shows how many requests
an overloaded server rejects, and how long the others wait.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import uvloop

from bench.client import Answer, ChatClient, chat_body, served, succeeded, text_of, user_message, watch_health
from bench.flags import SERVER, make_parser
from bench.pictures import make_uris
from bench.processes import cpu_seconds
from bench.report import PERCENTILES, percentiles_ms, table, write_result


def make_bodies(args: argparse.Namespace, model: str, count: int, seed: int, words: Sequence[str]) -> list[dict[str, Any]]:
    """Return all requests, made before the clock starts. With several comma-separated models, requests use them in turn."""
    models = model.split(",")
    uris = iter(make_uris(seed, count * args.images, args.resolution, args.content))
    bodies = []
    for i in range(count):
        message = user_message([next(uris) for _ in range(args.images)], text_of(args.input_tokens, seed * 100_003 + i, words))
        body = chat_body(models[i % len(models)], [message], args.output_tokens, temperature=1) | args.fields
        bodies.append({name: value for name, value in body.items() if value is not None})
    return bodies


async def drive(client: ChatClient, bodies: Iterable[dict[str, Any]], concurrency: int) -> list[Answer]:
    """Send all bodies, `concurrency` at a time. Return answers in the order of the bodies."""
    waiting, answers = enumerate(bodies), dict[int, Answer]()

    async def one_client() -> None:
        for number, body in waiting:
            answers[number] = await client.chat(body)

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return [answers[number] for number in sorted(answers)]


async def drive_at_rate(client: ChatClient, bodies: list[dict[str, Any]], per_second: float) -> list[Answer]:
    tasks, started = [], time.perf_counter()
    for number, body in enumerate(bodies):
        await asyncio.sleep(max(0.0, started + number / per_second - time.perf_counter()))
        tasks.append(asyncio.create_task(client.chat(body)))
    return await asyncio.gather(*tasks)


async def load(args: argparse.Namespace) -> dict[str, Any]:
    async with served(args) as (client, model):
        await drive(client, make_bodies(args, model, args.warm_ups, args.seed + 500_000, client.words), args.concurrency)
        bodies, health = make_bodies(args, model, args.requests, args.seed, client.words), list[float]()
        cpu = cpu_seconds(args.pid) if args.pid else {}
        watcher = asyncio.create_task(watch_health(args.url, health)) if args.rate else None
        started = time.perf_counter()
        answers = await (drive_at_rate(client, bodies, args.rate) if args.rate else drive(client, bodies, args.concurrency))
        seconds = time.perf_counter() - started
        if watcher is not None:
            watcher.cancel()
        cpu = {role: after - cpu[role] for role, after in (cpu_seconds(args.pid) if args.pid else {}).items()}
    result = measure(answers, seconds) | ({"health_ms": percentiles_ms(health)} if health else {})
    num_tokens = result["output_tokens_per_s"] * seconds
    return result | ({"cpu_us_per_token": {role: round(1e6 * used / num_tokens, 1) for role, used in cpu.items()}} if cpu else {})


def measure(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Return rates and percentiles in milliseconds; failed requests are counted and excluded."""
    good = succeeded(answers)
    samples = {
        "ttft_ms": [answer.ttft for answer in good],
        "tpot_ms": [answer.tpot for answer in good],
        "itl_ms": [latency for answer in good for latency in answer.latencies],
        "e2e_ms": [answer.finished - answer.started for answer in good],
    }
    return {
        "requests": len(good),
        "failed": len(answers) - len(good),
        "errors": sorted({answer.error for answer in answers if answer.error is not None})[:3],
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(sum(answer.num_tokens for answer in good) / seconds, 1),
        **{name: percentiles_ms(values) for name, values in samples.items() if values},
    }


def main() -> None:
    common = ("pid", "concurrency", "resolution", "content", "output-tokens")
    parser = make_parser("load", __doc__, *SERVER, *common, concurrency=32, content="smooth", output_tokens=128)
    parser.add_argument("--rate", type=float, help="requests per second, regardless of answers; default: --concurrency clients")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--warm-ups", type=int, default=8, help="warm-up requests, which are not counted")
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--input-tokens", type=int, default=256, help="approximate number of text tokens")
    parser.add_argument("--fields", type=json.loads, default={}, help="JSON merged into each request body; null removes a field")
    args = parser.parse_args()
    result = uvloop.run(load(args))
    print(f"{result['requests']} requests ({result['failed']} failed) in {result['seconds']} s", *result["errors"], sep="\n")
    print(f"{result['requests_per_s']} requests/s, {result['output_tokens_per_s']} output tokens/s")
    print(table(["", *(f"p{q}" for q in PERCENTILES)], [[name, *of.values()] for name, of in result.items() if name.endswith("_ms")]))
    print(*(f"{role}: {used} us of CPU per output token" for role, used in result.get("cpu_us_per_token", {}).items()), sep="\n")
    write_result(args, result=result)
