"""What we make of videos against what transformers' own processor made of them, with torchvision (`tests/unit/models/record_videos.py`)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from engine.wire.config import EngineConfig
from engine.wire.messages import MediaRef, VideoRef
from models.media.video import DEFAULT_SOURCE_FPS, time_text
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor.media.inspect import Inspector
from server.processor.media.video import VideoPlan, Videos
from server.processor.text.prompt import PromptBuilder, Visual
from tests.unit.models.record_videos import CASES, PROMPT, frames_of, sampled

(RECORDED,) = Path(__file__).parents[1].glob("models/videos_*.json")
FOUND: list[dict[str, Any]] = json.loads(RECORDED.read_text())


def plan_of(checkpoint: Checkpoint, case: tuple[int, int, int, float | None, dict[str, Any]]) -> VideoPlan:
    count, height, width, rate, asked = case
    size = asked.get("size", {})
    ref = VideoRef(
        file=MediaRef(), fps=asked.get("fps"), num_frames=asked.get("num_frames"), samples=asked.get("do_sample_frames"),
        min_pixels=size.get("shortest_edge"), max_pixels=size.get("longest_edge"),
    )  # fmt: skip
    unused: Any = None
    videos = Videos(EngineConfig(), checkpoint, Inspector(EngineConfig(), checkpoint, gpu_decodes=False), unused, unused, unused)
    video = videos.geometry_of(ref)
    indices = video.sample(count, rate)
    return videos.plan(video, indices, [index / (rate or DEFAULT_SOURCE_FPS) for index in indices], (height, width))


@pytest.fixture(scope="module")
def builder(checkpoint: Checkpoint) -> PromptBuilder:
    return PromptBuilder(checkpoint)


@pytest.mark.parametrize(("case", "found"), list(zip(CASES, FOUND, strict=True)))
def test_ids_grids_and_pixels_are_the_references(checkpoint: Checkpoint, builder: PromptBuilder, case: Any, found: dict[str, Any]) -> None:
    if "error" in found:
        with pytest.raises(RequestError, match="at least 2 frames"):
            plan_of(checkpoint, case)
        return
    plan = plan_of(checkpoint, case)
    num_pairs = len(plan.indices) // 2
    assert [num_pairs, *plan.grid[1:]] == found["grid"]
    ids = builder.encode(builder.tokenizer.encode(PROMPT, add_special_tokens=False).ids, ["video"])
    prompt = builder.expand(ids, [Visual("video", [plan.num_tokens] * num_pairs, [time_text(time) for time in plan.times])])
    assert (list(prompt.ids[: len(found["ids"])]), len(prompt.ids)) == (found["ids"], found["num_ids"])
    frames = frames_of(*case[:3])
    resized = [Image.fromarray(frames[index]).resize(plan.size[::-1], Image.Resampling.BICUBIC) for index in plan.indices]
    pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in resized])).permute(0, 3, 1, 2)[None]
    patches, *_ = Qwen3VLVideoProcessor.patchify(None, pixels.float() / 127.5 - 1, 16, 2, 2)
    assert np.abs(np.array(sampled(patches)) - np.array(found["pixels"])).max() <= 2
