"""Growing conversations, where each turn adds one image and resends all, and a long shared document with many questions.

    python -m bench chat --url http://127.0.0.1:8000 --resolution 720p --turns 8 --clients 1
    python -m bench chat --url http://127.0.0.1:8000 --document 16 --questions 32 --concurrency 8

The second form sends the same questions twice: each with new images (cold), then all about one new document.
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

import uvloop

from bench.breakdown import part_columns, ttft_figures
from bench.client import Answer, ChatClient, chat_body, served, succeeded, text_of, user_message
from bench.flags import SERVER, make_parser
from bench.load import drive
from bench.pictures import make_uris
from bench.report import table, write_result

TURN_TOKENS = 32


def images(args: argparse.Namespace, seed: int, count: int) -> list[str]:
    return make_uris(args.seed + seed, count, args.resolution, args.content)


def question(model: str, uris: list[str], salt: int) -> dict[str, Any]:
    return chat_body(model, [user_message(uris, text_of(TURN_TOKENS, salt))], TURN_TOKENS)


async def converse(client: ChatClient, model: str, uris: list[str], seed: int) -> list[Answer]:
    messages: list[dict[str, Any]] = []
    answers = []
    for turn, uri in enumerate(uris):
        messages.append(user_message([uri], text_of(TURN_TOKENS, seed * 1000 + turn)))
        answer = await client.chat(chat_body(model, messages, TURN_TOKENS))
        answers.append(answer)
        if answer.error:
            break
        messages.append({"role": "assistant", "content": answer.text})
    return answers


async def conversations(client: ChatClient, model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    pictures = [images(args, 1 + i, args.turns) for i in range(args.clients)]
    started = time.perf_counter()
    talks = await asyncio.gather(*(converse(client, model, uris, 1 + i) for i, uris in enumerate(pictures)))
    seconds = time.perf_counter() - started
    turns = ([talk[turn] for talk in talks if len(talk) > turn and talk[turn].error is None] for turn in range(args.turns))
    rows = [row_of(f"turn {number}", good) for number, good in enumerate(turns, 1) if good]
    return [*rows, row_of("all", [answer for talk in talks for answer in talk], seconds)]


async def document(client: ChatClient, model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask about one document, cold (new images each) and shared (the same images). Return both and the gain in throughput."""
    shared, rows = images(args, 1, args.document), []
    for name in ("cold", "shared"):
        uris = (shared if name == "shared" else images(args, 100 + i, args.document) for i in range(args.questions))
        bodies = [question(model, each, i) for i, each in enumerate(uris)]
        started = time.perf_counter()
        answers = await drive(client, bodies, args.concurrency)
        rows.append(row_of(name, answers, time.perf_counter() - started))
    rows[1]["times_cold"] = round(rows[1]["requests_per_s"] / rows[0]["requests_per_s"], 2)
    return rows


def row_of(name: str, answers: list[Answer], seconds: float | None = None) -> dict[str, Any]:
    """Return medians of the answers and, over `seconds`, their rate and the number of errors."""
    good = succeeded(answers)
    cached = [answer.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) for answer in good]
    row = {
        "name": name,
        **ttft_figures(good),
        "prompt_tokens": good[0].usage.get("prompt_tokens"),
        "cached_tokens": statistics.median(cached),
    }
    rate = {} if seconds is None else {"failed": len(answers) - len(good), "requests_per_s": round(len(good) / seconds, 3)}
    return row | rate


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    async with served(args) as (client, model):
        count = args.document or args.turns  # the largest measured size, which would otherwise include one-time costs
        await client.chat(question(model, images(args, 9_999, count), 9_999))
        return await (document if args.document else conversations)(client, model, args)


def main() -> None:
    parser = make_parser("chat", __doc__, *SERVER, "resolution", "content", "concurrency", content="noise", concurrency=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--clients", type=int, default=1, help="concurrent conversations")
    parser.add_argument("--document", type=int, default=0, help="images of the shared document; 0: hold conversations")
    parser.add_argument("--questions", type=int, default=32)
    args = parser.parse_args()
    rows = uvloop.run(run(args))
    names, (parts, cells) = [name for name in rows[-1] if name not in ("stages_ms", "parts_ms")], part_columns(rows)
    print(table([*names, *parts], [[*(row.get(name, "") for name in names), *cells[i]] for i, row in enumerate(rows)]))
    write_result(args, rows=rows)
