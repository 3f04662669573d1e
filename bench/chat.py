"""Growing conversations, where each turn adds one image and resends all.

python -m bench chat --url http://127.0.0.1:8000 --resolution 720p --turns 8 --clients 1
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
from bench.pictures import make_uris
from bench.report import table, write_result

TURN_TOKENS = 32


def images(args: argparse.Namespace, seed: int, count: int) -> list[str]:
    return make_uris(args.seed + seed, count, args.resolution, args.content)


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
        warm_up = user_message(images(args, 9_999, args.turns), text_of(TURN_TOKENS, 9_999))  # the largest measured size
        await client.chat(chat_body(model, [warm_up], TURN_TOKENS))
        return await conversations(client, model, args)


def main() -> None:
    parser = make_parser("chat", __doc__, *SERVER, "resolution", "content", content="noise")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--clients", type=int, default=1, help="concurrent conversations")
    args = parser.parse_args()
    rows = uvloop.run(run(args))
    names, (parts, cells) = [name for name in rows[-1] if name not in ("stages_ms", "parts_ms")], part_columns(rows)
    print(table([*names, *parts], [[*(row.get(name, "") for name in names), *cells[i]] for i, row in enumerate(rows)]))
    write_result(args, rows=rows)
