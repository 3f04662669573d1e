"""Growing conversations, where each turn adds one image and resends all, and a long shared document with many questions.

    python -m bench chat --url http://127.0.0.1:8000 --resolution 720p --turns 8 --clients 1
    python -m bench chat --url http://127.0.0.1:8000 --document 16 --questions 32 --concurrency 8
    python -m bench chat --url http://127.0.0.1:8000 --repeat 32
    python -m bench chat --url http://127.0.0.1:8000 --replicas    # the address of `engine.serve --dp 2` with the demo model

The second form sends the same questions twice: each with new images (cold), then all about one new document.
`--repeat` sends one request with that many images several times. For cold caches use a new seed.
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

import uvloop

from bench.breakdown import part_cells, part_names, ttft_figures
from bench.client import Answer, ChatClient, chat_body, text_of, user_message
from bench.flags import SERVER, make_parser
from bench.load import drive
from bench.pictures import RESOLUTIONS, data_uri, make_jpegs
from bench.replicas import check_replicas
from bench.report import table, write_result

TURN_TOKENS = 32
REPEATS = 4


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("chat", __doc__, *SERVER)
    parser.add_argument("--resolution", choices=list(RESOLUTIONS), default="720p")
    parser.add_argument("--content", choices=["noise", "smooth"], default="noise")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--clients", type=int, default=1, help="concurrent conversations")
    parser.add_argument("--document", type=int, default=0, help="images of the shared document; 0: hold conversations")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=0, help="send one request with this many images several times")
    parser.add_argument("--replicas", action="store_true", help="check several engines behind the affinity proxy instead")
    return parser.parse_args(argv)


def images(args: argparse.Namespace, seed: int, count: int) -> list[str]:
    return [data_uri(jpeg) for jpeg in make_jpegs(args.seed + seed, count, args.resolution, args.content)]


async def converse(client: ChatClient, model: str, uris: list[str], seed: int) -> list[Answer]:
    """Run one conversation: every turn resends it with one more image."""
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
    """Return the median TTFT of each turn over all clients, and of all turns with their rate."""
    pictures = [images(args, 1 + i, args.turns) for i in range(args.clients)]
    started = time.perf_counter()
    talks = await asyncio.gather(*(converse(client, model, uris, 1 + i) for i, uris in enumerate(pictures)))
    seconds = time.perf_counter() - started
    rows = []
    for turn in range(args.turns):
        good = [talk[turn] for talk in talks if len(talk) > turn and talk[turn].error is None]
        if good:
            rows.append(point(f"turn {turn + 1}", good))
    answers = [answer for talk in talks for answer in talk]
    return [*rows, rated("all", answers, seconds)]


async def document(client: ChatClient, model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask about one document, cold (new images each) and shared (the same images). Return both and the gain in throughput."""
    rows = []
    shared = images(args, 1, args.document)
    for name in ("cold", "shared"):
        bodies = []
        for i in range(args.questions):
            uris = shared if name == "shared" else images(args, 100 + i, args.document)
            bodies.append(chat_body(model, [user_message(uris, text_of(TURN_TOKENS, i))], TURN_TOKENS))
        started = time.perf_counter()
        answers = await drive(client, bodies, args.concurrency)
        rows.append(rated(name, answers, time.perf_counter() - started))
    rows[1]["times_cold"] = round(rows[1]["requests_per_s"] / rows[0]["requests_per_s"], 2)
    return rows


async def repeat(client: ChatClient, model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Send one request repeatedly."""
    body = chat_body(model, [user_message(images(args, 1, args.repeat), text_of(TURN_TOKENS, 1))], TURN_TOKENS)
    return [point(f"time {i + 1}", [await client.chat(body)]) for i in range(REPEATS)]


def rated(name: str, answers: list[Answer], seconds: float) -> dict[str, Any]:
    """Return a row with the rate of answers and the number of errors."""
    good = [answer for answer in answers if answer.error is None]
    if not good:
        raise SystemExit(f"every request failed: {answers[0].error}")
    return point(name, good) | {"failed": len(answers) - len(good), "requests_per_s": round(len(good) / seconds, 3)}


def point(name: str, answers: list[Answer]) -> dict[str, Any]:
    cached = [answer.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) for answer in answers]
    return {
        "name": name,
        **ttft_figures(answers),
        "prompt_tokens": answers[0].usage.get("prompt_tokens"),
        "cached_tokens": statistics.median(cached),
    }


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    async with ChatClient(args.url, args.api_key) as client:
        model = args.model or await client.model()
        count = args.document or args.repeat or args.turns  # the largest measured size, which would otherwise include one-time costs
        warm_up = images(args, 9_999, count)
        await client.chat(chat_body(model, [user_message(warm_up, "warm up")], TURN_TOKENS))
        if args.document:
            return await document(client, model, args)
        return await (repeat if args.repeat else conversations)(client, model, args)


def main() -> None:
    """Entry point."""
    args = parse_args()
    if args.replicas:
        found = uvloop.run(check_replicas(args))
        print(table(["", "value"], [[name, str(value)] for name, value in found.items()]))
        write_result(args, result=found)
        return
    rows = uvloop.run(run(args))
    names = [name for name in rows[-1] if name not in ("stages_ms", "parts_ms")]
    parts = part_names(rows)
    print(table([*names, *parts], [[*(row.get(name, "") for name in names), *part_cells(row, parts)] for row in rows]))
    write_result(args, rows=rows)


if __name__ == "__main__":
    main()
