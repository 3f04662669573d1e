"""The whole engine and transformers give the same greedy text, with any step size, number of ranks, load or cache."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from models.scaffold import SHAPES, write_model_folder
from tests.e2e.reference import Reference
from tests.e2e.serving import Counted, Engine, data_uri, image_part, picture, serve, text_part

pytestmark = pytest.mark.e2e

MAX_TOKENS = 32
SIZES = [(64, 64), (96, 160), (200, 120), (256, 256), (70, 330)]

CLIP = [picture(seed, 70, 110) for seed in range(20, 25)]  # an odd number of frames
LONGER_CLIP = CLIP[2:4] + [picture(seed, 70, 110) for seed in range(40, 43)]
SHOWN = [picture(seed, *size) for seed, size in enumerate(SIZES)]
Turn = tuple[str, list[Any]]  # a role, and texts, pictures and clips
CONVERSATIONS: list[list[Turn]] = [
    [("user", ["Say something, please: \u00e4\u00f6\u00fc \U0001f600."])],
    [("user", [SHOWN[1], "What is this?"])],
    [("user", [part for i in range(5) for part in (SHOWN[i], f"picture {i}")])],
    [
        ("system", ["You look at pictures."]),
        ("user", [SHOWN[3], "What is this?"]),
        ("assistant", ["Something."]),
        ("user", ["And these?", SHOWN[0], SHOWN[4]]),
    ],
    [("user", ["First", CLIP, "then", SHOWN[2], "What changes?"])],
]


def video_part(frames: list[Image.Image]) -> dict[str, Any]:
    return {"type": "video", "video": [data_uri(frame) for frame in frames]}


def messages_of(turns: list[Turn], image: Callable[[Any], object], video: Callable[[Any], object]) -> list[dict[str, Any]]:
    def form(part: Any) -> object:
        return text_part(part) if isinstance(part, str) else video(part) if isinstance(part, list) else image(part)

    return [{"role": role, "content": parts[0] if parts[1:] == [] else [form(part) for part in parts]} for role, parts in turns]


def transformers_answers(folder: Path) -> list[str]:
    reference, found = Reference(folder), []
    for turns in CONVERSATIONS:
        parts = [part for _, parts in turns for part in parts]
        images, clips = ([part for part in parts if isinstance(part, kind)] for kind in (Image.Image, list))
        messages = messages_of(turns, lambda _: {"type": "image"}, lambda _: {"type": "video"})
        found.append(reference.text(messages, images, MAX_TOKENS, True, clips))
    return found


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[str]:
    return transformers_answers(tiny)


def answers(engine: Engine, at_once: bool) -> list[str]:
    requests = [messages_of(turns, image_part, video_part) for turns in CONVERSATIONS]

    def ask(messages: list[dict[str, Any]]) -> str:
        return engine.text(None, messages=messages, max_tokens=MAX_TOKENS, ignore_eos=True)

    if not at_once:
        return [ask(messages) for messages in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


def assert_parity(engine: Engine, expected: list[str]) -> None:
    assert engine.client.post("/flush_cache").status_code == 200
    with Counted(engine) as counted:
        assert answers(engine, at_once=True) == expected, "fresh, batched"
    assert counted.grown["images_encoded"] == len(SHOWN) + (len(CLIP) + 1) // 2
    with Counted(engine) as counted:
        assert answers(engine, at_once=False) == expected, "cached, alone"
    assert counted.grown["images_encoded"] == 0
    with Counted(engine) as counted:
        engine.text([video_part(LONGER_CLIP), text_part("And now?")])
    assert counted.grown["images_encoded"] == 2, "one pair is that of the other clip"


@pytest.mark.gate
def test_whole_prompts(tiny_engine: Engine, expected: list[str]) -> None:
    assert_parity(tiny_engine, expected)


def test_a_mixture_of_experts_on_two_ranks(tmp_path: Path) -> None:
    write_model_folder(tmp_path, SHAPES["tiny-moe"], weights="random", seed=0)
    steps = ("--max-num-batched-tokens", "256", "--max-num-mixed-tokens", "256")
    with serve(tmp_path, *steps, "--tp", "2", "--ep", "--no-prefix-cache") as engine:
        assert answers(engine, at_once=True) == transformers_answers(tmp_path)
        usage = engine.chat(None, messages=messages_of(CONVERSATIONS[3], image_part, video_part)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
