"""Records what transformers' own `Qwen3VLProcessor` makes of videos: `python -m tests.unit.models.record_videos`. It needs torchvision.

The file's name has the versions; `test_video_fixtures.py` compares with it where there is no torchvision.
"""

import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from models.scaffold import SHAPES, write_model_folder

NUM_SAMPLES = 200  # of the pixels of each case
PROMPT = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What?<|im_end|>\n"

# Frames, height, width, rate of the source (None: unknown) and what is asked for.
CASES: list[tuple[int, int, int, float | None, dict[str, Any]]] = [
    (1, 64, 64, 24.0, {"do_sample_frames": False}),
    *((count, 90, 130, 24.0, {"do_sample_frames": False}) for count in (2, 3, 4, 5, 7, 8)),
    (60, 374, 374, 30.0, {"fps": 2}),
    (61, 374, 374, 29.97, {"fps": 8}),
    (30, 31, 500, 25.0, {"fps": 4}),
    (12, 720, 1280, 6.0, {"fps": 2}),
    (48, 100, 150, None, {"fps": 2}),
    (48, 100, 150, 12.0, {"fps": None, "num_frames": 9}),
    (3, 100, 150, 12.0, {"fps": None, "num_frames": 6}),
    (40, 200, 120, 60000 / 1001, {"fps": 30, "size": {"shortest_edge": 4096, "longest_edge": 400_000}}),
    (6, 20, 24, 3.0, {"fps": 3, "size": {"shortest_edge": 60_000, "longest_edge": 400_000}}),
]


def frames_of(count: int, height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    waves = [[abs((3 * x + 2 * (c + 1) * y + 11 * i * (c + 1)) % 510 - 255) for c in range(3)] for i in range(count)]
    return np.array(waves, np.uint8).transpose(0, 2, 3, 1)


def sampled(pixels: torch.Tensor) -> list[int]:
    """Pixels 0 to 255 at places spread over all patches."""
    flat = pixels.reshape(-1)
    places = torch.linspace(0, len(flat) - 1, NUM_SAMPLES, dtype=torch.float64).long()
    values: list[int] = ((flat[places] + 1) * 127.5).round().int().tolist()
    return values


def main() -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), SHAPES["tiny"], weights="none", seed=0)
        videos = Qwen3VLVideoProcessor.from_pretrained(folder)
        images = Qwen2VLImageProcessor.from_pretrained(folder)
        processor = Qwen3VLProcessor(images, AutoTokenizer.from_pretrained(folder), videos)
        found = [record(processor, *case) for case in CASES]
    versions = [f"{name}_{importlib.metadata.version(name)}" for name in ("transformers", "torchvision")]
    out = Path(__file__).with_name(f"videos_{'_'.join(versions)}.json")
    out.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in found) + "\n]\n")
    print(out)


def record(processor: Any, count: int, height: int, width: int, rate: float | None, asked: dict[str, Any]) -> dict[str, Any]:
    metadata = {"total_num_frames": count, "fps": rate, "frames_indices": list(range(count))}
    try:
        made = processor(text=[PROMPT], videos=[frames_of(count, height, width)], video_metadata=[metadata], return_tensors="pt", **asked)
    except ValueError as error:
        return {"error": str(error)}
    return {
        "grid": made["video_grid_thw"][0].tolist(),
        "ids": made["input_ids"][0].tolist() if made["input_ids"].shape[1] < 1000 else made["input_ids"][0].tolist()[:60],
        "num_ids": made["input_ids"].shape[1],
        "pixels": sampled(made["pixel_values_videos"]),
    }


if __name__ == "__main__":
    main()
