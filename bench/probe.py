"""The image-limit probe: time to first token against the number of images in one request, on any OpenAI-compatible URL.

    python -m bench images --url http://127.0.0.1:8000 --resolutions 720p,1080p,2k --counts 1,8,32

Rules: uniform-noise JPEGs (quality 85), new at every step, images first, then 256 text tokens, temperature 0, 32 tokens out, ignore_eos,
streaming, three warm-up requests, one request at a time. TTFT ends at the first non-empty text; it is reported with the client's
serialisation ("ttft"), without it ("ttft sent"), and in the parts of bench/breakdown.py.
"""

import argparse
import statistics
from typing import Any

import uvloop

from bench.breakdown import part_columns, ttft_figures
from bench.client import Answer, ChatClient, chat_body, served, text_of, user_message
from bench.flags import SERVER, make_parser
from bench.pictures import RESOLUTIONS, make_uris
from bench.report import table, write_result

TEXT_TOKENS = 256
OUTPUT_TOKENS = 32
WARM_UPS = 3
CLOCKS = {"before": "ttft_ms", "after": "ttft_sent_ms"}


async def ask(client: ChatClient, model: str, args: argparse.Namespace, resolution: str, count: int, seed: int) -> Answer:
    """Send one request with new images, made before the clock starts."""
    uris = make_uris(seed, count, resolution, args.content)
    return await client.chat(chat_body(model, [user_message(uris, text_of(TEXT_TOKENS, seed, client.words))], OUTPUT_TOKENS))


async def measure(client: ChatClient, model: str, args: argparse.Namespace, resolution: str, count: int) -> dict[str, Any]:
    first = 10**7 * args.seed + 1_000 * count + 100_000 * (1 + list(RESOLUTIONS).index(resolution))
    answers = [await ask(client, model, args, resolution, count, first + i) for i in range(args.repeats)]
    point: dict[str, Any] = {"resolution": resolution, "images": count}
    if errors := [answer.error for answer in answers if answer.error]:
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
    async with served(args) as (client, model):
        for i in range(WARM_UPS):
            await ask(client, model, args, "720p", 1, 10**7 * args.seed + 7_000_000 + i)
        for resolution in args.resolutions.split(","):
            for count in sorted(int(count) for count in args.counts.split(",")):
                point = await measure(client, model, args, resolution, count)
                points.append(point)
                print(f"{resolution:>6} N={count:<4} {point.get('error') or shown(point, CLOCKS[args.clock])}", flush=True)
                if "error" in point:
                    break
    return points


def shown(point: dict[str, Any], clock: str) -> str:
    return f"ttft {point[clock]:9.1f} ms   tpot {point['tpot_ms']:6.2f} ms   {point['prompt_tokens']} prompt tokens"


def main() -> None:
    parser = make_parser("images", __doc__, *SERVER, "content", content="noise")
    parser.add_argument("--resolutions", default="720p,1080p,2k", help="one or more of " + ", ".join(RESOLUTIONS))
    parser.add_argument("--counts", default="1,2,4,8,16,32,64", help="numbers of images; default: %(default)s")
    parser.add_argument("--clock", choices=CLOCKS, default="before", help="TTFT of the table: before or after serialisation")
    parser.add_argument("--repeats", type=int, default=3, help="fresh requests per point; the median is shown")
    args = parser.parse_args()
    points = uvloop.run(probe(args))
    (names, parts), key = part_columns(points), CLOCKS[args.clock]
    times = ["failed" if "error" in point else f"{point[key]:.1f}" for point in points]
    rows = [[point["resolution"], point["images"], time, *cells] for point, time, cells in zip(points, times, parts, strict=True)]
    print(table(["size", "N", f"ttft ({args.clock} serialisation)", *names], rows))
    largest = {point["resolution"]: f"{point['resolution']}: {point['images']}" for point in points if "error" not in point}
    print("largest N answered:", ", ".join(largest.values()))
    write_result(args, content=args.content, points=points)


if __name__ == "__main__":
    main()
