"""Goodput: the highest rate of Poisson arrivals at which 99 % of the requests keep a limit.

    python -m bench goodput --url http://127.0.0.1:8000 --workload image

`image`, `images`: one or four 720p images, 256 tokens in, 128 out. `chat`: conversations of six turns, each adds an image and resends all.
For these, the first token takes at most 1 s, and the next ones 100 ms each. `catalogue`: an image of any size, 800 to 60,000 tokens
(log-normal, median 4,100), at most 150 out, in 12 s; `interactive`: the same in 1.5 s. They have the shape of MLPerf Inference's VLM
benchmark without its data: start the server with `--no-enable-prefix-caching`. Works with any OpenAI-compatible server.

Each point sends `rate * --duration` conversations with new images and texts, at the times of a Poisson process that has this many, and
ends early if too many requests were late. A request with an error, a 503 or no end after `--timeout` seconds misses its limits. The rate
changes by `--factor` until one rate holds and another one does not, then the two approach each other.
"""

import argparse
import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import uvloop

from bench.client import Answer, ChatClient, chat_body, served, text_of, user_message
from bench.flags import SERVER, make_parser
from bench.pictures import RESOLUTIONS, make_uris
from bench.report import write_result

ALLOWED = 0.01  # share of misses
LEAST_RATE = 0.01
FAR_SEEDS = 1_000_003  # between points
FEWEST_TOKENS, MEDIAN_TOKENS, MOST_TOKENS = 800, 4100, 60_000
MEASURES: dict[str, Callable[[Answer], list[float]]] = {
    "ttft": lambda answer: [answer.ttft],
    "itl": lambda answer: answer.latencies,
    "e2e": lambda answer: [answer.finished - answer.started],
}


@dataclass(frozen=True, slots=True)
class Workload:
    images: int = 1  # of a turn
    turns: int = 1
    limits: Mapping[str, float] = field(default_factory=lambda: {"ttft": 1.0, "itl": 0.1})  # seconds, by the name of a measure
    is_varied: bool = False  # sizes of images and texts
    output_tokens: int = 128
    fields: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 1.0})


CATALOGUE = Workload(1, 1, {"e2e": 12.0}, True, 150, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "ignore_eos": False})
WORKLOADS = {
    "image": Workload(),
    "images": Workload(images=4),
    "chat": Workload(turns=6),
    "catalogue": CATALOGUE,
    "interactive": replace(CATALOGUE, limits={"e2e": 1.5}),
}


def misses(answers: Sequence[Answer], limits: Mapping[str, float]) -> dict[str, float]:
    """Return the share of values above each limit; an answer with an error counts as one."""
    values = {name: [each for answer in answers for each in ([math.inf] if answer.error else MEASURES[name](answer))] for name in limits}
    return {name: sum(each > limits[name] for each in of) / max(1, len(of)) for name, of in values.items()}


class Point(NamedTuple):
    """`rate`: conversations per second, which are requests if they have one turn."""

    rate: float
    requests: int
    missed: dict[str, float]

    @property
    def holds(self) -> bool:
        return max(self.missed.values()) <= ALLOWED


async def search(measure: Callable[[float], Awaitable[Point]], rate: float, precision: float, factor: float = 2.0) -> list[Point]:
    """Measure points until the highest rate that holds is within `precision` of one that does not. SystemExit if none holds."""
    points = list[Point]()
    while rate > LEAST_RATE:
        points.append(await measure(rate))
        low = max((point.rate for point in points if point.holds), default=0.0)
        high = min((point.rate for point in points if not point.holds and point.rate > low), default=math.inf)
        if low and high <= low * (1 + precision):
            return points
        rate = math.sqrt(low * high) if low and high < math.inf else low * factor if low else high / factor
    raise SystemExit("the limits hold at no rate")


def conversations(workload: Workload, count: int, seed: int, words: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Return the user's messages of each conversation."""

    def message(salt: int) -> dict[str, Any]:
        rng, resolution, num_tokens = random.Random(str(salt)), "720p", 256
        if workload.is_varied:
            resolution = rng.choice(list(RESOLUTIONS))
            num_tokens = int(min(MOST_TOKENS, max(FEWEST_TOKENS, rng.lognormvariate(math.log(MEDIAN_TOKENS), 1.0))))
        return user_message(make_uris(salt, workload.images, resolution, "smooth"), text_of(num_tokens, salt, words))

    with ThreadPoolExecutor() as pool:
        messages = list(pool.map(message, range(seed, seed + count * workload.turns)))
    return [messages[first : first + workload.turns] for first in range(0, len(messages), workload.turns)]


async def converse(args: argparse.Namespace, client: ChatClient, model: str, turns: list[dict[str, Any]]) -> list[Answer]:
    workload, messages, answers = WORKLOADS[args.workload], list[dict[str, Any]](), list[Answer]()
    for turn in turns:
        messages.append(turn)
        try:
            body = chat_body(model, messages, workload.output_tokens) | dict(workload.fields)
            answers.append(await asyncio.wait_for(client.chat(body), args.timeout))
        except TimeoutError:
            answers.append(Answer(error="timeout"))
        if answers[-1].error:
            break
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers + [Answer(error="the conversation has ended")] * (len(turns) - len(answers))


async def measure_point(args: argparse.Namespace, client: ChatClient, model: str, rate: float, seed: int) -> Point:
    workload, rng = WORKLOADS[args.workload], random.Random(seed)
    times = sorted(rng.uniform(0, args.duration) for _ in range(max(1, round(rate * args.duration))))
    talks = await asyncio.to_thread(conversations, workload, len(times), seed, client.words)

    async def talk(after: float, turns: list[dict[str, Any]]) -> list[Answer]:
        await asyncio.sleep(after)
        return await converse(args, client, model, turns)

    waiting = [asyncio.ensure_future(talk(*each)) for each in zip(times, talks, strict=True)]
    answers, missed = list[Answer](), dict.fromkeys(workload.limits, 0.0)
    while waiting and max(missed.values()) * len(answers) <= ALLOWED * len(talks) * workload.turns:
        done, pending = await asyncio.wait(waiting, timeout=1.0)
        answers, waiting = sum((each.result() for each in done), answers), list(pending)
        missed = misses(answers, workload.limits)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    point = Point(rate, len(answers), missed)
    print(f"{rate:.3f} per second {'holds' if point.holds else 'does not hold'}: {len(answers)} requests, late {point.missed}", flush=True)
    return point


async def run(args: argparse.Namespace) -> list[Point]:
    async with served(args) as (client, model):
        for turns in conversations(WORKLOADS[args.workload], 4, args.seed + FAR_SEEDS // 2, client.words):
            await converse(args, client, model, turns)
        seeds = iter(range(args.seed * 10**9, 1 << 62, FAR_SEEDS))
        return await search(lambda rate: measure_point(args, client, model, rate, next(seeds)), args.rate, args.precision, args.factor)


def main() -> None:
    parser = make_parser("goodput", __doc__, *SERVER, "duration", duration=40.0)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rate", type=float, default=4.0, help="first conversations per second; default: %(default)s")
    parser.add_argument("--factor", type=float, default=2.0, help="largest factor between a rate and the next; default: %(default)s")
    parser.add_argument("--precision", type=float, default=0.05, help="largest distance of the last two rates; default: %(default)s")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds; default: %(default)s")
    args = parser.parse_args()
    points = uvloop.run(run(args))
    best = max(point.rate for point in points if point.holds) * WORKLOADS[args.workload].turns
    print(f"goodput of {args.workload}: {best:.2f} requests per second")
    write_result(args, requests_per_s=best, points=points)
