"""Ask a running server new questions and count correct answers: `python -m bench accuracy --url ... --questions 500`."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import aiohttp
import uvloop

from bench.client import ChatClient, served
from bench.flags import SERVER, make_parser
from bench.load import drive
from bench.report import write_result
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
        return self.error is None and self.said == self.answer


async def ask_server(client: ChatClient, model: str, items: Sequence[Question], concurrency: int) -> list[Result]:
    """Ask all questions greedily with at most `concurrency` in flight. Return results in the order of the questions."""
    fields = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    replies = await drive(client, ({"messages": item.messages(), **fields} for item in items), concurrency)
    return [Result(item.seed, item.task, item.answer, reply.text, reply.error) for item, reply in zip(items, replies, strict=True)]


async def run(args: argparse.Namespace) -> list[Result]:
    items = list(islice(questions(args.seed, args.tasks), args.questions))
    async with served(args) as (client, model):
        return await ask_server(client, model, items, args.concurrency)


def report(results: Sequence[Result]) -> dict[str, object]:
    """Return the scores per task and in total, the number of failed requests, and the first wrong answers."""
    scores = score((result.task, result.right) for result in results)
    overall = Score("all", sum(each.right for each in scores), len(results))
    rows = [asdict(each) | {"accuracy": each.accuracy, "interval": each.interval} for each in (*scores, overall)]
    wrong = [asdict(result) for result in results if not result.right][:50]
    return {"scores": rows, "errors": sum(result.error is not None for result in results), "wrong": wrong}


def main() -> None:
    parser = make_parser("accuracy", __doc__, *SERVER, "concurrency", seed=1, concurrency=16)
    parser.add_argument("--questions", type=int, default=300, help="over all tasks")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(DEFAULT_TASKS))
    args = parser.parse_args()
    try:
        results = uvloop.run(run(args))
    except aiohttp.ClientConnectionError as problem:
        raise SystemExit(f"{args.url} does not answer: {problem}") from None
    summary = report(results)
    write_result(args, **summary)
    print(table(score((result.task, result.right) for result in results)))
    if summary["errors"]:
        raise SystemExit(f"{summary['errors']} requests failed; first: {next(result.error for result in results if result.error)}")
