"""Check several engines behind the affinity proxy with the demo model: correct answers, an even load, one encode per image.

Every client repeats a question several times, like turns of a conversation, before its next one; then each engine is asked directly. The
model may be wrong, but answers that differ between engines are errors.
"""

import argparse
import asyncio
import re
import time
from itertools import islice
from typing import Any

import aiohttp

from bench.accuracy import Result, ask_server
from bench.client import ChatClient
from models.demo.questions import Question, questions

TASKS = ("number", "list", "colour", "shape", "which")
ROUNDS = 4  # repetitions of each question
STATISTICS_S = 2.5  # engines publish their metrics once per second


async def asked(url: str, items: list[Question], rounds: int, concurrency: int) -> list[tuple[int, Result]]:
    """Return the numbers of questions, and the answers."""
    waiting = iter(enumerate(items))
    results = []
    async with ChatClient(url) as client:
        model = await client.model()

        async def one_client() -> None:
            for index, item in waiting:
                for _ in range(rounds):
                    results.append((index, (await ask_server(client, model, [item], 1))[0]))

        await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return results


async def engines(url: str) -> dict[str, dict[str, float]]:
    """Return the requests and encoded images of each engine so far."""
    await asyncio.sleep(STATISTICS_S)
    found = {}
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/health") as answer:
            backends = (await answer.json())["backends"]
        for backend in backends:
            async with session.get(f"{backend['url']}/metrics") as answer:
                text = await answer.text()
            encoded = re.findall(r"^engine_images_encoded_total\{.*\} (\S+)$", text, re.MULTILINE)
            found[backend["url"]] = {"requests": backend["num_taken"], "images_encoded": sum(map(float, encoded))}
    return found


async def check_replicas(args: argparse.Namespace) -> dict[str, Any]:
    """Ask `--questions` questions `--repeat` times each. Exit with an error if requests failed or engines disagree."""
    items = list(islice(questions(args.seed, TASKS), args.questions))
    before, started = await engines(args.url), time.perf_counter()
    results = await asked(args.url, items, (args.repeat or ROUNDS), args.concurrency)
    seconds = time.perf_counter() - started
    after = await engines(args.url)
    direct = [result for url in after for result in await asked(url, items, 1, args.concurrency)]
    said: dict[int, set[str]] = {index: set() for index in range(len(items))}
    for index, result in (*results, *direct):
        said[index].add(result.error or result.said)
    work = {url: {name: after[url][name] - before[url][name] for name in after[url]} for url in after}
    counts = [of["requests"] for of in work.values()]
    found: dict[str, Any] = {
        "requests": len(results),
        "requests_per_s": round(len(results) / seconds, 2),
        "failed": sum(result.error is not None for _, result in results),
        "right": round(sum(result.right for _, result in results) / len(results), 4),
        "questions_with_other_answers_elsewhere": sum(len(texts) > 1 for texts in said.values()),
        "pictures": len({picture.data for item in items for picture in item.pictures}),
        "images_encoded": sum(of["images_encoded"] for of in work.values()),
        "most_requests_over_mean": round(max(counts) * len(counts) / sum(counts), 3),
        "engines": work,
    }
    if found["failed"] or found["questions_with_other_answers_elsewhere"]:
        raise SystemExit(f"requests failed, or engines disagree: {found}")
    return found
