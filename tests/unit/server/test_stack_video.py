"""Videos through the real api and processor: the ids of the reference, and what each dialect may say of a video."""

import base64
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from engine.messages import EngineRequest, ErrorInfo, MediaRef, VideoRef
from server.api.chat.conversation import read_conversation
from server.api.chat.schema import ChatRequest
from server.errors import RequestError
from server.http.scan import Scanner
from tests.eventually import eventually
from tests.unit.server.clips import encode, frames_of, gif, joined
from tests.unit.server.pictures import jpeg, save
from tests.unit.server.stack import Stack, answer_ids, hold_silently
from tests.unit.server.test_stack import image, uri

FRAMES = frames_of(20)
CLIP = encode(FRAMES)  # 2 s
START, PAD, END = "<|vision_start|>", "<|video_pad|>", "<|vision_end|>"


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


def video(data: bytes, mime: str = "video/mp4", **fields: object) -> dict[str, object]:
    return {"type": "video_url", "video_url": {"url": uri(data, mime), **fields}}


def listed(frames: list[Any], **fields: object) -> dict[str, object]:
    return {"type": "video", "video": [uri(save(Image.fromarray(frame), "PNG"), "image/png") for frame in frames], **fields}


def text(value: str) -> dict[str, object]:
    return {"type": "text", "text": value}


def written(grid: tuple[int, int, int], indices: list[int], fps: float) -> str:
    """What the reference's processor makes of one placeholder."""
    import torch

    of = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    times = partial(Qwen3VLProcessor._calculate_timestamps, None)
    processor: Any = SimpleNamespace(
        video_processor=of, vision_start_token=START, video_token=PAD, vision_end_token=END, _calculate_timestamps=times
    )
    inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [VideoMetadata(20, fps=fps, frames_indices=list(indices))]}
    return str(Qwen3VLProcessor.replace_video_token(processor, inputs, 0))


def last(stack: Stack) -> EngineRequest:
    return stack.scheduler.requests[-1]


def test_ids_and_spans_are_the_references(stack: Stack, tokenizer: Any) -> None:
    """Red if a token differs: of times, of the ends around a pair, or in their order among pictures and other videos."""
    parts = [text("a"), video(CLIP), image(uri(jpeg())), text("b"), listed(FRAMES[:3], fps=30.0), text("c")]
    assert stack.chat(parts).status_code == 200
    request = last(stack)
    messages = [{"role": "user", "content": [{"type": kind} for kind in ("text", "video", "image", "text", "video", "text")]}]
    for entry, value in zip((e for e in messages[0]["content"] if e["type"] == "text"), "abc", strict=True):
        entry["text"] = value
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    clip, few = written((2, 4, 6), [0, 6, 13, 19], 10.0), written((2, 4, 6), [0, 1, 2], 30.0)
    before, between, behind = rendered.split(PAD)
    picture = between.replace("<|image_pad|>", "<|image_pad|>" * request.images[2].length)
    ids = tokenizer(before + clip + picture + few + behind).input_ids
    assert stack.scheduler.prompt(request) == ids
    pad = tokenizer.convert_tokens_to_ids(PAD)
    assert [span.source.num_frames for span in request.images] == [2, 2, 1, 2, 2]
    for span in request.images[:2] + request.images[3:]:
        assert span.grid == (1, 4, 6) and span.length == 6 and span.source.region.length == 2 * 64 * 96 * 3
        assert set(ids[span.start : span.end]) == {pad} and pad not in (ids[span.start - 1], ids[span.end])


def test_pixels_of_a_known_clip_are_made_when_they_are_wanted(stack: Stack) -> None:
    """Red if a pair is not found by its index among the items of a request, or if a clip is decoded more than once for several."""
    clip = encode(frames_of(16, first=3))
    stack.chat([video(clip)])
    hashes = [span.hash for span in last(stack).images]
    stack.scheduler.pixels.clear()

    def want(scheduler: Any, request: EngineRequest) -> None:
        hold_silently(scheduler, request)
        if all(span.source.encoding == "file" for span in request.images[1:]):
            scheduler.want(request.rid, 1, 2)

    stack.scheduler.script = want
    import threading

    asking = threading.Thread(target=lambda: stack.chat([image(uri(jpeg())), video(clip), text("?")]))
    asking.start()
    eventually(lambda: len(stack.scheduler.pixels) == 2)
    request = last(stack)
    assert [span.hash for span in request.images[1:]] == hashes
    sources = [pixels.source for pixels in sorted(stack.scheduler.pixels, key=lambda pixels: pixels.index)]
    assert all(source is not None and (source.encoding, source.num_frames) == ("rgb", 2) for source in sources)
    answer_ids([65])(stack.scheduler, request)
    asking.join()


def reads(part: dict[str, object], **fields: Any) -> VideoRef:
    request = ChatRequest(messages=[{"role": "user", "content": [part]}], **fields)  # type: ignore[list-item]
    body: Any = SimpleNamespace(scanner=Scanner("nonce", 8), region=SimpleNamespace(offset=0), credentials=b"")
    (ref,) = read_conversation(request.messages, body, None, request.mm_processor_kwargs, request.media_io_kwargs).media
    assert isinstance(ref, VideoRef)
    return ref


URL = "https://x.org/a.mp4"


@pytest.mark.parametrize(
    ("part", "fields", "expected"),
    [
        ({"url": URL}, {}, {}),
        ({"url": URL, "fps": 4.0}, {"mm_processor_kwargs": {"num_frames": 8}}, {"fps": 4.0}),
        ({"url": URL}, {"mm_processor_kwargs": {"num_frames": 8}, "media_io_kwargs": {"video": {"fps": 1.0}}}, {"num_frames": 8}),
        ({"url": URL}, {"media_io_kwargs": {"video": {"num_frames": 32}}}, {"num_frames": 32}),
        ({"url": URL}, {"media_io_kwargs": {"video": {"num_frames": -1}}}, {"samples": False}),
        ({"url": URL}, {"mm_processor_kwargs": {"fps": 1.0}, "media_io_kwargs": {"video": {"num_frames": -1}}}, {"fps": 1.0}),
        ({"url": URL}, {"mm_processor_kwargs": {"do_sample_frames": False}}, {"samples": False}),
        ({"url": URL}, {"mm_processor_kwargs": {"size": {"longest_edge": 9, "shortest_edge": 5}}}, {"min_pixels": 5, "max_pixels": 9}),
        ({"url": URL, "max_pixels": 7}, {"mm_processor_kwargs": {"max_pixels": 9}}, {"max_pixels": 7}),
        ({"url": URL, "max_frames": 9, "max_tokens_per_frame": 64}, {}, {"max_frames": 9, "max_frame_tokens": 64}),
    ],
)  # fmt: skip
def test_what_is_said_of_a_file(part: dict[str, object], fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Red if something further away from the video outweighs what stands beside it."""
    assert reads({"type": "video_url", "video_url": part}, **fields) == VideoRef(file=MediaRef(url=URL), **expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"fps": 2.0, "frames_indices": [0, 4]}, {"source_fps": 2.0, "indices": [0, 4]}),
        ({"timestamps": [0.5, 7.5]}, {"times": [0.5, 7.5]}),
    ],
)
def test_what_is_said_of_frames(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    frames = [MediaRef(url=f"https://x.org/{i}.jpg") for i in range(2)]
    found = reads({"type": "video", "video": [frame.url for frame in frames], **fields})
    assert found == VideoRef(frames=frames, samples=False, **expected)
    jpegs = "data:video/jpeg;base64,aa,bb"
    found = reads({"type": "video_url", "video_url": jpegs, **fields})
    assert found == VideoRef(file=MediaRef(url=jpegs), holds_frames=True, samples=False, **({"source_fps": 1.0} | expected))


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ({"type": "video", "video": [URL, URL]}, {"mm_processor_kwargs": {"do_sample_frames": True}}),
        ({"type": "video", "video": [URL, URL], "timestamps": [2.0, 1.0]}, {}),
        ({"type": "video", "video": [URL], "timestamps": [2.0], "frames_indices": [1]}, {}),
        ({"type": "video_url", "video_url": URL, "timestamps": [2.0]}, {}),
        ({"type": "video_url", "video_url": None}, {}),
        ({"type": "video", "video": ["a.mp4"]}, {}),
    ],
)
def test_what_makes_no_sense_is_refused(part: dict[str, object], fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        reads(part, **fields)
    assert caught.value.info.status == 400 and (caught.value.info.param or "").startswith("messages[0].content[0]")


def test_every_way_to_send_frames(stack: Stack) -> None:
    """Red if a dialect or a form loses the video, or makes other pairs of the same frames."""
    few = FRAMES[:4]
    joint = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + joined(few).decode()}}
    hashes = []
    for part in (joint, listed(few), listed(few, timestamps=[0.0, 1.0, 2.0, 3.0])):
        assert stack.chat([part]).status_code == 200
        hashes.append([span.hash for span in last(stack).images])
    assert hashes[0] == hashes[1] == hashes[2] and len(hashes[0]) == 2
    clip = base64.b64encode(CLIP).decode()
    block = {"type": "video", "source": {"type": "base64", "media_type": "video/mp4", "data": clip}}
    messages = [{"role": "user", "content": [block]}]
    assert stack.http.post("/v1/messages", json={"model": "test-model", "max_tokens": 9, "messages": messages}).status_code == 200
    of_clip = [span.hash for span in last(stack).images]
    content = [{"type": "input_video", "video_url": uri(CLIP, "video/mp4")}]
    answer = stack.http.post("/v1/responses", json={"model": "test-model", "input": [{"role": "user", "content": content}]})
    assert answer.status_code == 200 and [span.hash for span in last(stack).images] == of_clip
    named = {"type": "video_url", "video_url": None, "uuid": "clip"}
    assert stack.chat([{**video(CLIP), "uuid": "clip"}]).status_code == stack.chat([named]).status_code == 200
    assert [span.hash for span in last(stack).images] == of_clip


def error_of(stack: Stack, part: dict[str, object]) -> ErrorInfo:
    answer = stack.chat([part])
    error = answer.json()["error"]
    assert error["message"].startswith("Video 1: ")
    return ErrorInfo(answer.status_code, error["message"], code=error["code"])


def test_gifs_and_one_frame(stack: Stack) -> None:
    assert stack.chat([video(gif(FRAMES[:5]), "image/gif")]).status_code == 200
    assert len(last(stack).images) == 2
    refused = error_of(stack, video(encode(FRAMES[:1])))
    assert (refused.status, refused.code) == (400, "invalid_video") and "at least 2 frames" in refused.message
