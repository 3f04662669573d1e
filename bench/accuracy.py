"""Ask a running server new questions and count correct answers: `python -m bench accuracy --url ... --questions 500`.

Works with any OpenAI-compatible URL that serves the demo model. The e2e tests use `ask_server` with a few dozen questions.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import aiohttp
import uvloop

from bench.client import ChatClient
from bench.flags import SERVER, make_parser
from models.demo.questions import TASKS, Question, questions
from models.demo.score import Score, score, table

MAX_TOKENS = 160  # counting to thirty takes about 120
DEFAULT_TASKS = ("number", "list", "colour", "shape", "which", "count")


@dataclass(frozen=True, slots=True)
class Result:
    """Answer to one question; an `error` counts as wrong."""

    seed: int
    task: str
    answer: str
    said: str
    error: str | None

    @property
    def right(self) -> bool:
        """Return whether the answer matches exactly."""
        return self.error is None and self.said == self.answer


def body(item: Question, model: str) -> dict[str, Any]:
    """Return a greedy, streamed chat request."""
    return {"model": model, "messages": item.messages(), "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}


async def ask_server(client: ChatClient, model: str, items: Sequence[Question], concurrency: int) -> list[Result]:
    """Ask all questions with at most `concurrency` in flight. Return results in the order of the questions."""
    gate = asyncio.Semaphore(concurrency)

    async def one(item: Question) -> Result:
        async with gate:
            reply = await client.chat(body(item, model))
        return Result(item.seed, item.task, item.answer, reply.text, reply.error)

    return await asyncio.gather(*(one(item) for item in items))


async def run(args: argparse.Namespace) -> list[Result]:
    """Generate the questions and ask them in slices, which bounds the memory of encoded pictures."""
    stream = questions(args.seed, args.tasks)
    results: list[Result] = []
    async with ChatClient(args.url, args.api_key) as client:
        model = args.model or await client.model()
        while len(results) < args.questions:
            items = list(islice(stream, min(4 * args.concurrency, args.questions - len(results))))
            results += await ask_server(client, model, items, args.concurrency)
    return results


def report(results: Sequence[Result]) -> dict[str, object]:
    """Return the scores per task and in total, the number of failed requests, and the first wrong answers."""
    scores = score((r.task, r.right) for r in results)
    overall = Score("all", sum(s.right for s in scores), len(results))
    rows = [asdict(s) | {"accuracy": s.accuracy, "interval": s.interval} for s in (*scores, overall)]
    return {"scores": rows, "errors": sum(r.error is not None for r in results), "wrong": [asdict(r) for r in results if not r.right][:50]}


def main() -> None:
    """Read the flags, ask, print the table; exit status 1 if requests failed."""
    parser = make_parser("accuracy", __doc__, *SERVER, seed=1)
    parser.add_argument("--questions", type=int, default=300, help="over all tasks")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(DEFAULT_TASKS))
    args = parser.parse_args()
    try:
        results = uvloop.run(run(args))
    except aiohttp.ClientConnectionError as problem:
        raise SystemExit(f"{args.url} does not answer: {problem}") from None
    summary = report(results)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    print(table(score((r.task, r.right) for r in results)))
    if summary["errors"]:
        raise SystemExit(f"{summary['errors']} requests failed; first: {next(r.error for r in results if r.error)}")


if __name__ == "__main__":
    main()
