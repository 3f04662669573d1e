"""The whole engine and transformers give the same greedy text, with any step size, number of ranks, load or cache."""

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

Conversation = tuple[list[dict[str, Any]], list[int]]
CLIP = [picture(seed, 70, 110) for seed in range(20, 25)]  # an odd number of frames
LONGER_CLIP = CLIP[2:4] + [picture(seed, 70, 110) for seed in range(40, 43)]


def conversations() -> list[Conversation]:
    """Messages with image parts `{"type": "image"}`, and the seeds of their pictures: text, one image, five, several turns, a video (CLIP)
    and a picture."""
    image, video = {"type": "image"}, {"type": "video"}
    five = [part for i in range(5) for part in (image, text_part(f"picture {i}"))]
    turns = [
        {"role": "system", "content": "You look at pictures."},
        {"role": "user", "content": [image, text_part("What is this?")]},
        {"role": "assistant", "content": "Something."},
        {"role": "user", "content": [text_part("And these?"), image, image]},
    ]
    return [
        ([{"role": "user", "content": "Say something, please: \u00e4\u00f6\u00fc \U0001f600."}], []),
        ([{"role": "user", "content": [image, text_part("What is this?")]}], [1]),
        ([{"role": "user", "content": five}], [0, 1, 2, 3, 4]),
        (turns, [3, 0, 4]),
        ([{"role": "user", "content": [text_part("First"), video, text_part("then"), image, text_part("What changes?")]}], [2]),
    ]


def with_pictures(conversation: Conversation) -> list[dict[str, Any]]:
    messages, seeds = conversation
    order = iter(seeds)

    def fill(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "video":
            return video_part(CLIP)
        return image_part(picture(seed, *SIZES[seed])) if part["type"] == "image" and (seed := next(order)) >= 0 else part

    return [
        {**message, "content": [fill(part) for part in message["content"]]} if isinstance(message["content"], list) else message
        for message in messages
    ]


def video_part(frames: list[Image.Image]) -> dict[str, Any]:
    return {"type": "video", "video": [data_uri(frame) for frame in frames]}


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[str]:
    return transformers_answers(tiny)


def transformers_answers(folder: Path) -> list[str]:
    reference = Reference(folder)
    return [
        reference.text(messages, [picture(seed, *SIZES[seed]) for seed in seeds], MAX_TOKENS, True, [CLIP] * str(messages).count("'video'"))
        for messages, seeds in conversations()
    ]


def answers(engine: Engine, at_once: bool) -> list[str]:
    requests = [with_pictures(conversation) for conversation in conversations()]

    def ask(messages: list[dict[str, Any]]) -> str:
        return engine.text(None, messages=messages, max_tokens=MAX_TOKENS, ignore_eos=True)

    if not at_once:
        return [ask(messages) for messages in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


def assert_parity(engine: Engine, expected: list[str]) -> None:
    """Fresh and batched, then cached and alone; each image and frame pair is encoded once."""
    assert engine.client.post("/flush_cache").status_code == 200
    with Counted(engine) as counted:
        assert answers(engine, at_once=True) == expected, "fresh, batched"
    num_pairs = (len(CLIP) + 1) // 2
    assert counted.grown["images_encoded"] == len({seed for _, seeds in conversations() for seed in seeds}) + num_pairs
    with Counted(engine) as counted:
        assert answers(engine, at_once=False) == expected, "cached, alone"
    assert counted.grown["images_encoded"] == 0
    with Counted(engine) as counted:
        engine.text([video_part(LONGER_CLIP), text_part("And now?")])
    assert counted.grown["images_encoded"] == 2, "one pair is that of the other clip"


@pytest.mark.gate
def test_whole_prompts(tiny_engine: Engine, expected: list[str]) -> None:
    """Text, images, several turns, a video."""
    assert_parity(tiny_engine, expected)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("experts")
    write_model_folder(folder, SHAPES["tiny-moe"], weights="random", seed=0)
    return folder, transformers_answers(folder)


@pytest.mark.parametrize("flags", [("--no-prefix-cache",), ("--ep",)])
def test_a_mixture_of_experts_on_two_ranks(experts: tuple[Path, list[str]], flags: tuple[str, ...]) -> None:
    """Ranks with shares of experts, and with whole ones."""
    folder, expected = experts
    with serve(folder, "--max-num-batched-tokens", "256", "--max-num-mixed-tokens", "256", "--tp", "2", *flags) as engine:
        assert answers(engine, at_once=True) == expected
        usage = engine.chat(None, messages=with_pictures(conversations()[3])).json()["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] == 0) == (flags == ("--no-prefix-cache",))


def test_an_fp8_checkpoint_and_rounding_at_the_start_answer_alike(tiny: Path, expected: list[str], tmp_path: Path) -> None:
    """`--quantization fp8` makes what the published FP8 checkpoints hold."""
    write_model_folder(tmp_path / "fp8", SHAPES["tiny"], weights="random", seed=0, is_fp8=True)
    found = []
    for folder, flags in ((tmp_path / "fp8", []), (tiny, ["--quantization", "fp8"])):
        with serve(folder, *flags) as engine:
            found.append(answers(engine, at_once=False))
    assert found[0] == found[1] != expected
