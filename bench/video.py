"""Videos: time to first token of new clips and of another question about them.

    python -m bench video --url http://127.0.0.1:8000 --shape 8B --clip 374 --fps 1,2,4,8
    python -m bench video --url http://127.0.0.1:8000 --shape 8B --clip 374 --fps 2 --clients 32 --requests 128 --output-tokens 100

Clips are made here: H.264 at 30 frames per second, 374 is 30 s of 374 x 374, 720p is 10 s. First
requests are reported with the compute bound and the decoding time (the server's `prepare` stage).
"""

import argparse
import io
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import numpy as np
import uvloop

from bench.bounds import MERGE, PATCH, Model
from bench.client import ChatClient, chat_body, served, succeeded, text_of, user_message
from bench.flags import SERVER, make_parser
from bench.load import drive, measure
from bench.pictures import Pixels, data_uri, smooth, with_noise
from bench.report import table, write_result
from models.media.video import VideoGeometry, time_text
from models.scaffold import SHAPES, Shape

CLIPS = {"374": (30, 374, 374), "720p": (10, 720, 1280), "tiny": (2, 64, 96)}  # seconds, height, width
RATE = 30
TEXT_TOKENS = 50
TEMPLATE_TOKENS = 8
SHIFT, NOISE = 64, 6  # rows by which a clip moves; amplitude of its noise


def frames_of(seed: int, seconds: int, height: int, width: int) -> Iterator[Pixels]:
    rng, count = np.random.default_rng(seed), seconds * RATE
    wide = smooth(rng, (12, 12), height + SHIFT, 2 * width)
    for i in range(count):
        left, top = i * width // count, i * SHIFT // count
        yield with_noise(rng, wide[top : top + height, left : left + width], NOISE)


def make_clip(seed: int, kind: str) -> bytes:
    """Return an MP4 of the frames of this seed; bytes may differ between runs."""
    seconds, height, width = CLIPS[kind]
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=RATE, options={"preset": "veryfast"})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for frame in frames_of(seed, seconds, height, width):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return out.getvalue()


def compute_bound(shape: Shape, pairs: int, patches: int, num_tokens: int) -> float:
    """Return the compute-bound time in ms: the tower on `pairs` frame pairs of `patches` patches each, then the decoder's prefill."""
    return 1e3 * (pairs * Model(shape).tower_s(patches) + Model(shape).prefill_s(num_tokens))


def expected(kind: str, fps: float) -> tuple[int, int, int]:
    """Return frame pairs, patches per pair and prompt tokens by the formulas of the published checkpoints."""
    seconds, height, width = CLIPS[kind]
    geometry = VideoGeometry(PATCH, MERGE, 2, 4096, 25_165_824, fps=fps)
    indices = geometry.sample(seconds * RATE, RATE)
    pairs, rows, columns = geometry.grid(len(indices), height, width)
    times = sum(len(time_text(time)) - len(" seconds") + 1 for time in geometry.pair_times([index / RATE for index in indices]))
    return pairs, rows * columns, times + pairs * (2 + rows * columns // MERGE**2) + 2 + TEXT_TOKENS + TEMPLATE_TOKENS


def body_of(args: argparse.Namespace, model: str, clip: bytes, salt: int, fps: float) -> dict[str, Any]:
    """Return a request with a question about a clip sampled at `fps`. Requests with different rates share no frame pairs."""
    message = user_message([data_uri(clip, "video/mp4")], text_of(TEXT_TOKENS, salt), "video")
    return chat_body(model, [message], args.output_tokens) | {"mm_processor_kwargs": {"fps": fps}}


async def measure_fps(client: ChatClient, model: str, clips: list[bytes], fps: float, args: argparse.Namespace) -> dict[str, Any]:
    first, again = ([body_of(args, model, clip, salt + i, fps) for i, clip in enumerate(clips)] for salt in (0, 1000))
    started = time.perf_counter()
    answers = await drive(client, first, args.clients)
    seconds = time.perf_counter() - started
    repeated = succeeded(await drive(client, again, args.clients))
    good, bound = succeeded(answers), compute_bound(SHAPES[args.shape], *expected(args.clip, fps))
    prepare = statistics.median(answer.timings.get("prepare_ms", 0.0) for answer in good)
    ttft = 1e3 * statistics.median(answer.ttft for answer in good)
    return {
        "fps": fps,
        "prompt_tokens": good[0].usage.get("prompt_tokens"),
        "bound_ms": round(bound, 2),
        "decode_ms": round(prepare, 1),
        "ttft_ms": round(ttft, 1),
        "times_bound": round((ttft - prepare) / bound, 2),
        "again_ms": round(1e3 * statistics.median(answer.ttft for answer in repeated), 1),
        "requests_per_s": round(len(answers) / seconds, 3),
        "load": measure(answers, seconds),
    }


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(4) as pool:
        clips = list(pool.map(lambda i: make_clip(args.seed * 1000 + i, args.clip), range(args.requests + 1)))
    async with served(args) as (client, model):
        rates = [float(fps) for fps in args.fps.split(",")]
        for fps in rates:  # warm-up
            await client.chat(body_of(args, model, clips[-1], 0, fps))
        return [await measure_fps(client, model, clips[:-1], fps, args) for fps in rates]


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("video", __doc__, *SERVER, "output-tokens", output_tokens=1)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8B", help="size of the served model, for the bound")
    parser.add_argument("--clip", choices=list(CLIPS), default="374")
    parser.add_argument("--fps", default="2", help="sampled frames per second, or several separated by commas")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--requests", type=int, default=5)
    args = parser.parse_args(argv)
    rows = uvloop.run(run(args))
    names = [name for name in rows[0] if name != "load"]
    print(table(names, [[row[name] for name in names] for row in rows]))
    print(*(error for row in rows for error in row["load"]["errors"]), sep="\n")
    write_result(args, rows=rows)
