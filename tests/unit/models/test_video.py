"""Our sampling, sizes and times against the formulas of transformers' own file, run without torchvision, and against its tables."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata

from models.config.huggingface import read_config
from models.config.video import read_video_geometry
from models.media.video import VideoGeometry, time_text
from models.scaffold import SHAPES, write_model_folder
from tests.unit.models.harness import VIDEO_GEOMETRY as PUBLISHED

RATES = [None, 1.0, 12.5, 23.976, 24.0, 25.0, 29.97, 30000 / 1001, 59.94, 60.0]


def reference_indices(geometry: VideoGeometry, total: int, source_fps: float | None, **kwargs: Any) -> list[int]:
    processor: Any = SimpleNamespace(fps=geometry.fps, min_frames=geometry.min_frames, max_frames=geometry.max_frames)
    metadata = VideoMetadata(total_num_frames=total, fps=source_fps)
    return Qwen3VLVideoProcessor.sample_frames(processor, metadata, **kwargs).tolist()  # type: ignore[no-any-return]


def reference_size(num_frames: int, height: int, width: int, geometry: VideoGeometry = PUBLISHED) -> tuple[int, int]:
    max_pixels = geometry.max_pixels
    if geometry.max_frame_tokens:
        max_pixels = max(min(geometry.max_frame_tokens * 1024, max_pixels // num_frames), int(geometry.min_pixels * 1.05)) * num_frames
    return smart_resize(num_frames, height, width, 2, 32, geometry.min_pixels, max_pixels)  # type: ignore[no-any-return]


def test_frames_are_sampled_as_the_reference_does() -> None:
    for case in itertools.product([1, 2, 3, 4, 5, 7, 8, 30, 301, 900, 1799, 18_000, 108_000], RATES):
        total, source_fps = case
        for fps in (1, 2, 3.7, 4, 8, 30, 1000):
            geometry = VideoGeometry(16, 2, 2, 4096, 25_165_824, fps=fps)
            assert geometry.sample(total, source_fps) == reference_indices(PUBLISHED, total, source_fps, fps=fps), (*case, fps)
        for num_frames in (1, 2, 3, 5, 32, 768, 1000):  # not clamped: indices repeat
            geometry = VideoGeometry(16, 2, 2, 4096, 25_165_824, num_frames=num_frames)
            expected = reference_indices(PUBLISHED, total, source_fps, num_frames=num_frames)
            assert geometry.sample(total, source_fps) == expected, (*case, num_frames)
        assert VideoGeometry(16, 2, 2, 4096, 25_165_824, samples=False).sample(total, source_fps) == list(range(total)), case


def test_frames_are_resized_as_the_reference_does() -> None:
    capped = VideoGeometry(16, 2, 2, 4096, 25_165_824, max_frame_tokens=768)
    small = VideoGeometry(16, 2, 2, 300_000, 400_000)
    sizes = [(1, 1), (31, 500), (374, 374), (720, 1280), (1080, 1920), (2160, 3840), (4000, 90), (33, 6000), (7, 1399)]
    for case in itertools.product((PUBLISHED, capped, small), [2, 3, 4, 5, 7, 8, 20, 60, 121, 767, 768], sizes):
        geometry, num_frames, size = case
        height, width = reference_size(num_frames, *size, geometry)
        assert geometry.grid(num_frames, *size) == ((num_frames + 1) // 2, height // 16, width // 16), case


@pytest.mark.parametrize(("num_frames", "size"), [(1, (374, 374)), (4, (10, 3000)), (4, (0, 5))])
def test_what_the_reference_refuses(num_frames: int, size: tuple[int, int]) -> None:
    with pytest.raises((ValueError, ZeroDivisionError)):
        reference_size(num_frames, *size)
    with pytest.raises(ValueError, match=r"needs at least|aspect ratio"):
        PUBLISHED.grid(num_frames, *size)


def test_times_are_written_as_the_reference_does() -> None:
    for num_frames, source_fps in itertools.product([2, 3, 4, 5, 7, 8, 60], [24.0, 29.97, 30000 / 1001, 60.0]):
        indices = PUBLISHED.sample(1799, source_fps)[:num_frames]
        expected = Qwen3VLProcessor._calculate_timestamps(None, list(indices), source_fps, 2)
        found = PUBLISHED.pair_times([index / source_fps for index in indices])
        assert found == expected, (num_frames, source_fps)
        assert [time_text(time) for time in found] == [f"<{time:.1f} seconds>" for time in expected]


def test_what_a_checkpoint_says_counts(tmp_path: Path) -> None:
    write_model_folder(tmp_path, SHAPES["tiny"], weights="none", seed=0)
    images = read_config(tmp_path).geometry
    assert read_video_geometry(tmp_path, images) == PUBLISHED
    (tmp_path / "processor_config.json").write_text('{"video_processor": {"size": {"longest_edge": 234881024}, "max_frames": 2048}}')
    video = read_video_geometry(tmp_path, images)
    assert (video.max_pixels, video.max_frames, video.fps) == (234_881_024, 2048, 2.0)
