"""Effect of --draft: milliseconds per token without and with drafts, and the acceptance rate.

    python -m bench drafts --flags "--model demo" --sets demo forms --streams 1 4
    python -m bench drafts --flags "--model Qwen3-VL-8B --load-format dummy" --accept 0.7 --drafts 4 --sets random
    python -m bench drafts --flags "--model Qwen3.5-27B --load-format dummy" --draft mtp --accept 0.8 --drafts 3 --sets random

Starts an engine without and one with drafts. With --accept, for dummy weights, drafts are accepted with that probability
(`bench.accepting`): the second engine answers every prompt twice, and the second answer counts. Without --drafts it adapts as usual.
"""

import argparse
import asyncio
import inspect
import itertools
import random
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import uvloop

from bench.client import Answer, ChatClient, chat_body, text_of, user_message
from bench.flags import make_parser
from bench.load import drive
from bench.processes import running_engine
from bench.report import table, write_result
from models.demo.questions import question

BEAT_S = 1.5  # until the metrics include the last steps
FIELDS = ("name", "town", "street", "date_of_birth", "customer_number", "iban", "amount_due", "remarks")


def forms(i: int) -> dict[str, Any]:
    """Return OCR text of a page to convert to JSON."""
    rng = random.Random(i)
    values = (f"Ada {rng.randint(1, 99)}", "Aarhus", f"High Street {rng.randint(1, 99)}", f"19{rng.randint(40, 99)}-01-11",
              rng.randint(10**7, 10**8), f"NL{rng.randint(10**9, 10**10)}", f"{rng.randint(1, 999)}.50 EUR", "none")  # fmt: skip
    page = "\n".join(f"{name.replace('_', ' ').upper()} ..... {value}" for name, value in zip(FIELDS, values, strict=True))
    return {"messages": [user_message([], f"Write this form as JSON with the keys {', '.join(FIELDS)} and nothing else.\n\n{page}")]}


def code(i: int) -> dict[str, Any]:
    name = ("rng", "values", "page", "value")[i % 4]
    asked = f"Rename `{name}` to `{name}_{i}` and repeat the whole file, nothing else.\n\n{inspect.getsource(forms)}"
    return {"messages": [user_message([], asked)]}


def chance(i: int) -> dict[str, Any]:
    rng = random.Random(i)
    return {"messages": [user_message([], text_of(64, i) + " " + " ".join(str(rng.randrange(10**6)) for _ in range(20)))]}


def demo(i: int) -> dict[str, Any]:
    return {"messages": question(i, ("count_to", "list", "describe")[i % 3]).messages()}


SETS: dict[str, Callable[[int], dict[str, Any]]] = {"forms": forms, "code": code, "random": chance, "demo": demo}
DRAFTS, DRAFT_TOKENS, ACCEPTED = (f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))


def make_bodies(args: argparse.Namespace, model: str, name: str, salt: str) -> list[dict[str, Any]]:
    fields: dict[str, Any] = {"cache_salt": salt}
    if args.accept is not None:  # logits of dummy weights are so close that the batch size can change a greedy token
        fields |= {"ignore_eos": True, "logit_bias": {"100": 100}}
    return [chat_body(model, [], args.output_tokens) | fields | SETS[name](i) for i in range(args.requests)]


async def measure(args: argparse.Namespace, module: Sequence[str], flags: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    found = {}
    async with running_engine(flags, module) as (_, url), ChatClient(url) as client:
        model = await client.model()
        await drive(client, make_bodies(args, model, "random", "warm-up")[:2], 1)
        for name, streams in itertools.product(args.sets, args.streams):
            bodies = make_bodies(args, model, name, f"{name}-{streams}")
            for _ in range(rounds):
                before = await client.metrics(DRAFTS, DRAFT_TOKENS, ACCEPTED)
                answers = await drive(client, bodies, streams)
                await asyncio.sleep(BEAT_S)
                after = await client.metrics(*before)
            found[f"{name}, {streams}"] = figures(answers) | {total: after[total] - before[total] for total in after}
    return found


def figures(answers: list[Answer]) -> dict[str, Any]:
    if bad := [answer.error for answer in answers if answer.error]:
        raise SystemExit(f"{len(bad)} requests failed: {bad[0]}")
    long = [answer for answer in answers if answer.num_tokens > 1]
    seconds = sum(answer.finished - answer.token_times[0] for answer in long)
    num_tokens = sum(answer.num_tokens - 1 for answer in long)
    return {"ms_per_token": 1000 * seconds / max(1, num_tokens), "tokens": num_tokens, "texts": [answer.text for answer in answers]}


def row_of(name: str, plain: dict[str, Any], drafted: dict[str, Any]) -> dict[str, Any]:
    """Return a table row. A step yields a token and its accepted drafts; it takes longer by their verification and by the time from its
    result to the next step."""
    before, after = plain["ms_per_token"], drafted["ms_per_token"]
    steps = max(1, drafted["tokens"] - drafted[ACCEPTED])
    return {
        "set, streams": name,
        "ms per token without": round(before, 3),
        "with": round(after, 3),
        "a step": round(after * drafted["tokens"] / steps, 3),
        "times faster": round(before / after, 2),
        "tokens": drafted["tokens"],
        "steps with drafts": int(drafted[DRAFTS]),
        "proposed": int(drafted[DRAFT_TOKENS]),
        "accepted": f"{drafted[ACCEPTED] / max(1, drafted[DRAFT_TOKENS]):.0%}",
        "same texts": f"{sum(map(str.__eq__, plain['texts'], drafted['texts']))} of {len(plain['texts'])}",
    }


async def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    flags = shlex.split(args.flags)
    accepting = ["bench.accepting", str(args.accept), str(args.drafts)]
    module, rounds = (["engine.serve"], 1) if args.accept is None else (accepting, 2)
    plain = await measure(args, ["engine.serve"], flags, rounds)
    drafted = await measure(args, module, [*flags, "--draft", args.draft], rounds)
    return [row_of(name, plain[name], drafted[name]) for name in plain]


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("drafts", __doc__, "flags", "json", "output-tokens", output_tokens=256)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["forms", "code", "random"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1], help="concurrent clients")
    parser.add_argument("--requests", type=int, default=16, help="requests per set")
    parser.add_argument("--draft", choices=("lookup", "mtp", "eagle3"), default="lookup", help="draft source of the second engine")
    parser.add_argument("--accept", type=float, help="acceptance probability of a draft token; needs no weights")
    parser.add_argument("--drafts", type=int, default=0, help="with --accept: draft tokens per row and step; 0: adaptive")
    args = parser.parse_args(argv)
    rows = uvloop.run(compare(args))
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    write_result(args, rows=rows)
