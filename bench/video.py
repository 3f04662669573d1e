"""Videos: time to first token of new clips, of another question about them, and of frames that overlap with the previous ones.

    python -m bench video --url http://127.0.0.1:8000 --shape 8B --clip 374 --fps 1,2,4,8
    python -m bench video --url http://127.0.0.1:8000 --shape 8B --clip 720p --fps 2
    python -m bench video --url http://127.0.0.1:8000 --shape 8B --clip 374 --fps 2 --clients 32 --requests 128 --output-tokens 100

Clips are made here: H.264 at 30 frames a second, 374 is 30 s of 374 x 374 (as in TensorRT-LLM's issue 15598), 720p is 10 s. First
requests are reported with the compute bound and the decoding time (the server's `prepare` stage). Lists of frames are sent by one client.
"""

import argparse
import base64
import io
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import numpy as np
import uvloop
from PIL import Image

from bench.client import Answer, ChatClient, chat_body, text_of
from bench.flags import SERVER, make_parser
from bench.load import drive, measure
from bench.report import table, write_result
from models.media.video import VideoGeometry, time_text
from models.scaffold import SHAPES, Shape

CLIPS = {"374": (30, 374, 374), "720p": (10, 720, 1280), "tiny": (2, 64, 96)}  # seconds, height, width
RATE = 30
TEXT_TOKENS = 50
TEMPLATE_TOKENS = 8
PATCH, MERGE = 16, 2
LIST_RATE, OVERLAP_FRAMES = 8, 16  # a list of frames that is sent twice, the second time shifted by half


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("video", __doc__, *SERVER)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8B", help="size of the served model, for the bound")
    parser.add_argument("--tflops", type=float, default=790.0, help="TFLOP/s of the device in bf16, for the bound")
    parser.add_argument("--clip", choices=list(CLIPS), default="374")
    parser.add_argument("--fps", default="2", help="sampled frames per second, or several separated by commas")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--output-tokens", type=int, default=1)
    return parser.parse_args(argv)


def frames_of(seed: int, seconds: int, height: int, width: int) -> list[np.ndarray]:
    """Return a smooth moving picture with a little noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    wide = np.asarray(coarse.resize((2 * width, height + 64), Image.Resampling.BICUBIC), dtype=np.int16)
    frames = []
    for i in range(seconds * RATE):
        left, top = i * width // (seconds * RATE), i * 64 // (seconds * RATE)
        noise = rng.integers(-6, 7, (height, width, 1), dtype=np.int16)
        frames.append(np.clip(wide[top : top + height, left : left + width] + noise, 0, 255).astype(np.uint8))
    return frames


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


def compute_bound(shape: Shape, pairs: int, patches: int, num_tokens: int, tflops: float) -> float:
    """Return milliseconds of all products of the tower over so many pairs of patches, and of the decoder over the prompt."""
    width, inner = shape.vision_hidden, shape.vision_intermediate
    joined = width * MERGE**2
    block = 2 * patches * (4 * width**2 + 2 * width * inner) + 4 * patches**2 * width
    mergers = 2 * (patches // MERGE**2) * (joined**2 + joined * shape.hidden) * (1 + len(shape.deepstack))
    embedding = 2 * patches * width * 3 * PATCH**2 * 2
    tower = pairs * (shape.vision_depth * block + mergers + embedding)
    heads = 128 * shape.heads
    expert = shape.intermediate if shape.experts is None else shape.experts.per_token * shape.experts.intermediate
    layer = 2 * num_tokens * shape.hidden * (2 * heads + 2 * 128 * shape.kv_heads + 3 * expert) + 2 * heads * num_tokens**2
    decoder = shape.layers * layer + 2 * shape.hidden * shape.vocab_size
    return (tower + decoder) / tflops / 1e9


def published(fps: float = 2.0) -> VideoGeometry:
    return VideoGeometry(PATCH, MERGE, 2, 4096, 25_165_824, fps=fps)


def expected(kind: str, fps: float) -> tuple[int, int, int]:
    """Return pairs, patches per pair, and tokens of the prompt, by the formulas of the published checkpoints."""
    seconds, height, width = CLIPS[kind]
    geometry = published(fps)
    indices = geometry.sample(seconds * RATE, RATE)
    pairs, rows, columns = geometry.grid(len(indices), height, width)
    times = sum(len(time_text(time)) - len(" seconds") + 1 for time in geometry.pair_times([index / RATE for index in indices]))
    return pairs, rows * columns, times + pairs * (2 + rows * columns // MERGE**2) + 2 + TEXT_TOKENS + TEMPLATE_TOKENS


def body_of(model: str, part: dict[str, Any], question: int, output_tokens: int, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": [part, {"type": "text", "text": text_of(TEXT_TOKENS, question)}]}
    return chat_body(model, [message], output_tokens) | fields


def file_part(clip: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(clip).decode()}}


def frames_part(frames: list[np.ndarray]) -> dict[str, Any]:
    """Return JPEGs separated by commas."""
    texts = []
    for frame in frames:
        out = io.BytesIO()
        Image.fromarray(frame).save(out, "JPEG", quality=90)
        texts.append(base64.b64encode(out.getvalue()).decode())
    return {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(texts)}}


def median_ms(answers: list[Answer]) -> float:
    good = [answer.ttft for answer in answers if answer.error is None]
    if not good:
        raise SystemExit(f"every request failed: {answers[0].error}")
    return 1e3 * statistics.median(good)


async def measure_fps(client: ChatClient, model: str, clips: list[bytes], fps: float, args: argparse.Namespace) -> dict[str, Any]:
    """Measure new clips, then other questions about them. Every request contains the rate, so that rates share no pairs."""
    fields = {"mm_processor_kwargs": {"fps": fps}}
    first = [body_of(model, file_part(clip), i, args.output_tokens, **fields) for i, clip in enumerate(clips)]
    again = [body_of(model, file_part(clip), 1000 + i, args.output_tokens, **fields) for i, clip in enumerate(clips)]
    started = time.perf_counter()
    answers = await drive(client, first, args.clients)
    seconds = time.perf_counter() - started
    repeated = await drive(client, again, args.clients)
    pairs, patches, num_tokens = expected(args.clip, fps)
    bound = compute_bound(SHAPES[args.shape], pairs, patches, num_tokens, args.tflops)
    prepare = statistics.median([answer.timings.get("prepare_ms", 0.0) for answer in answers if answer.error is None] or [0.0])
    ttft = median_ms(answers)
    return {
        "fps": fps,
        "prompt_tokens": next((answer.usage.get("prompt_tokens") for answer in answers if answer.error is None), None),
        "bound_ms": round(bound, 2),
        "decode_ms": round(prepare, 1),
        "ttft_ms": round(ttft, 1),
        "times_bound": round((ttft - prepare) / bound, 2),
        "again_ms": round(median_ms(repeated), 1),
        "requests_per_s": round(len(answers) / seconds, 3),
        "load": measure(answers, seconds),
    }


async def measure_overlap(client: ChatClient, model: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure a list of frames, and a list that starts in its middle. Only the tower's part can shrink, by the bounds."""
    seconds, height, width = CLIPS[args.clip]
    count = min(OVERLAP_FRAMES, 2 * seconds * LIST_RATE // 3) // 4 * 4
    starts = {"list": 0, "overlapping": count // 2}
    answers: dict[str, list[Answer]] = {name: [] for name in starts}
    for i in range(args.requests + 1):  # excludes one-time costs
        frames = frames_of(args.seed + 900 + i, seconds, height, width)[:: RATE // LIST_RATE]
        for name, start in starts.items():
            part = frames_part(frames[start : start + count])
            answers[name].append(await client.chat(body_of(model, part, start, args.output_tokens)))
    found = {f"{name}_ms": round(median_ms(of[1:]), 1) for name, of in answers.items()}
    geometry = published()
    pairs, rows, columns = geometry.grid(count, height, width)
    num_tokens = next(answer.usage["prompt_tokens"] for answer in answers["list"] if answer.error is None)
    for name, new in (("list", pairs), ("overlapping", pairs // 2)):
        found[f"{name}_bound_ms"] = round(compute_bound(SHAPES[args.shape], new, rows * columns, num_tokens, args.tflops), 1)
    return found | {"share": round(found["overlapping_ms"] / found["list_ms"], 2)}


async def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    with ThreadPoolExecutor(4) as pool:
        clips = list(pool.map(lambda i: make_clip(args.seed + i, args.clip), range(args.requests + 1)))
    async with ChatClient(args.url, args.api_key) as client:
        model = args.model or await client.model()
        rates = [float(fps) for fps in args.fps.split(",")]
        for fps in rates:  # excludes one-time costs
            await client.chat(body_of(model, file_part(clips[-1]), 0, args.output_tokens, mm_processor_kwargs={"fps": fps}))
        rows = [await measure_fps(client, model, clips[:-1], fps, args) for fps in rates]
        return rows, await measure_overlap(client, model, args) if args.clients == 1 else {}


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    args = parse_args(argv)
    rows, overlap = uvloop.run(run(args))
    names = [name for name in rows[0] if name != "load"]
    print(table(names, [[row[name] for name in names] for row in rows]))
    print(*(error for row in rows for error in row["load"]["errors"]), sep="\n")
    if overlap:
        first, second = (f"{overlap[f'{name}_ms']} ms (bound {overlap[f'{name}_bound_ms']})" for name in ("list", "overlapping"))
        print(f"a list of frames {first}; half of it known {second}: {overlap['share']} of that")
    write_result(args, rows=rows, overlap=overlap)


if __name__ == "__main__":
    main()
