"""The image-limit probe: time to first token against the number of images in one request, on any OpenAI-compatible URL.

    python -m bench images --url http://127.0.0.1:8000 --resolutions 720p,1080p,2k --max-images 64

Rules: uniform-noise JPEGs (quality 85), new at every step, images first, then 256 text tokens, temperature 0, 32 tokens out, ignore_eos,
streaming, three warm-up requests, one request at a time. TTFT ends at the first non-empty text; it is reported with the client's
serialisation ("ttft"), without it ("ttft sent"), and in the parts of bench/breakdown.py.
"""

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import uvloop

from bench.breakdown import part_cells, part_names, ttft_figures
from bench.client import Answer, ChatClient, chat_body, text_of, user_message
from bench.flags import SERVER, make_parser
from bench.pictures import RESOLUTIONS, data_uri, make_jpegs
from bench.report import environment, table, write_json

TEXT_TOKENS = 256
OUTPUT_TOKENS = 32
WARM_UPS = 3


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("images", __doc__, *SERVER)
    parser.add_argument("--resolutions", default="720p,1080p,2k", help="some of " + ", ".join(RESOLUTIONS))
    parser.add_argument("--counts", help="numbers of images, such as 1,8,32; default: powers of two up to --max-images")
    parser.add_argument("--max-images", type=int, default=64)
    parser.add_argument("--content", choices=["noise", "smooth"], default="noise")
    parser.add_argument("--clock", choices=["before", "after"], default="before", help="TTFT of the table: before or after serialisation")
    parser.add_argument("--repeats", type=int, default=3, help="fresh requests per point; the median is shown")
    return parser.parse_args(argv)


def counts_of(args: argparse.Namespace) -> list[int]:
    """Return the numbers of images to try, ascending."""
    if args.counts:
        return sorted(int(count) for count in args.counts.split(","))
    powers: Iterator[int] = (1 << i for i in range(12))
    return sorted({count for count in powers if count < args.max_images} | {args.max_images})


async def ask(client: ChatClient, model: str, args: argparse.Namespace, resolution: str, count: int, seed: int) -> Answer:
    """Send one request with new images, made before the clock starts."""
    uris = [data_uri(jpeg) for jpeg in make_jpegs(seed, count, resolution, args.content)]
    return await client.chat(chat_body(model, [user_message(uris, text_of(TEXT_TOKENS, seed))], OUTPUT_TOKENS))


async def measure(client: ChatClient, model: str, args: argparse.Namespace, resolution: str, count: int) -> dict[str, Any]:
    """Repeat one point. Return medians, or the server's error."""
    first = args.seed + 1_000 * count + 100_000 * (1 + list(RESOLUTIONS).index(resolution))
    seeds = [first + i for i in range(args.repeats)]
    answers = [await ask(client, model, args, resolution, count, seed) for seed in seeds]
    errors = [answer.error for answer in answers if answer.error]
    point: dict[str, Any] = {"resolution": resolution, "images": count}
    if errors:
        return point | {"error": errors[0]}
    return point | {
        **ttft_figures(answers),
        "all_ttft_ms": [round(1e3 * answer.ttft, 2) for answer in answers],
        "tpot_ms": round(1e3 * statistics.median(answer.tpot for answer in answers), 3),
        "prompt_tokens": answers[0].usage.get("prompt_tokens"),
    }


async def probe(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every resolution and count; after a failure continue with the next resolution."""
    points = []
    async with ChatClient(args.url, args.api_key) as client:
        model = args.model or await client.model()
        for i in range(WARM_UPS):
            await ask(client, model, args, "720p", 1, args.seed + 7_000_000 + i)
        for resolution in args.resolutions.split(","):
            for count in counts_of(args):
                point = await measure(client, model, args, resolution, count)
                points.append(point)
                print(f"{resolution:>6} N={count:<4} {point.get('error') or shown(point, args.clock)}", flush=True)
                if "error" in point:
                    break
    return points


def shown(point: dict[str, Any], clock: str) -> str:
    ttft = point["ttft_ms"] if clock == "before" else point["ttft_sent_ms"]
    return f"ttft {ttft:9.1f} ms   tpot {point['tpot_ms']:6.2f} ms   {point['prompt_tokens']} prompt tokens"


def summary(points: list[dict[str, Any]], clock: str) -> str:
    """Return tables of times by part and of the largest number of images answered per resolution."""
    names = part_names(points)
    key = "ttft_ms" if clock == "before" else "ttft_sent_ms"
    rows = [[p["resolution"], p["images"], "failed" if "error" in p else f"{p[key]:.1f}", *part_cells(p, names)] for p in points]
    largest = {point["resolution"]: point["images"] for point in points if "error" not in point}
    limits = ", ".join(f"{resolution}: {count}" for resolution, count in largest.items())
    return table(["size", "N", f"ttft ({clock} serialisation)", *names], rows) + f"\nlargest N answered: {limits}"


def main() -> None:
    """Entry point."""
    args = parse_args()
    points = uvloop.run(probe(args))
    print(summary(points, args.clock))
    if args.json:
        write_json(args.json, {"environment": environment(), "content": args.content, "points": points})


if __name__ == "__main__":
    main()
