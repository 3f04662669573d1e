"""Videos through the real api and processor: the ids of the reference, and what each dialect may say of a video."""

import base64
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer

from engine.wire.messages import EngineRequest, MediaRef, VideoRef
from server.api.chat.completions import read_conversation
from server.api.http.scan import Scanner
from server.api.schema.requests import ChatRequest
from server.errors import RequestError
from tests.unit.server.clips import encode, frames_of, gif, joined
from tests.unit.server.pictures import jpeg, save
from tests.unit.server.stack import Stack
from tests.unit.server.test_stack import image, uri, user

FRAMES = frames_of(20)
CLIP = encode(FRAMES)  # 2 s


def video(data: bytes, mime: str = "video/mp4", **fields: object) -> dict[str, object]:
    return {"type": "video_url", "video_url": {"url": uri(data, mime), **fields}}


def listed(frames: list[Any], **fields: object) -> dict[str, object]:
    return {"type": "video", "video": [uri(save(Image.fromarray(frame), "PNG"), "image/png") for frame in frames], **fields}


def text(value: str) -> dict[str, object]:
    return {"type": "text", "text": value}


def last(stack: Stack) -> EngineRequest:
    return stack.last


def test_ids_and_spans_are_the_references(stack: Stack, tokenizer: Tokenizer) -> None:
    """Their times are those of transformers: `tests/unit/models/test_video.py`."""
    parts = [text("a"), video(CLIP), image(uri(jpeg())), text("b"), listed(FRAMES[:3], fps=30.0), text("c")]
    assert stack.chat(parts).status_code == 200
    request = last(stack)
    prompt = stack.scheduler.prompt(request)
    shown = f"<|vision_start|>{'<|image_pad|>' * request.images[2].length}<|vision_end|>"

    def pairs(*times: str) -> str:
        found = "".join(f"<{time} seconds><|vision_start|>{'<|video_pad|>' * 6}<|vision_end|>" for time in times)
        return f"<|vision_start|>{found}<|vision_end|>"

    expected = f"<|im_start|>user\na{pairs('0.3', '1.6')}{shown}b{pairs('0.0', '0.1')}c<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt, skip_special_tokens=False) == expected
    pad = tokenizer.token_to_id("<|video_pad|>")
    assert [span.source.num_frames for span in request.images] == [2, 2, 1, 2, 2]
    for span in request.images[:2] + request.images[3:]:
        assert span.grid == (1, 4, 6) and span.length == 6 and span.source.region.length == 2 * 64 * 96 * 3
        assert set(prompt[span.start : span.end]) == {pad} and pad not in (prompt[span.start - 1], prompt[span.end])


def reads(part: dict[str, object], **fields: Any) -> VideoRef:
    request = ChatRequest(messages=user([part]), **fields)
    body: Any = SimpleNamespace(scanner=Scanner("nonce", 8), region=SimpleNamespace(offset=0), credentials=b"")
    _, (ref,) = read_conversation(request, request.messages, body)
    assert isinstance(ref, VideoRef)
    return ref


URL = "https://x.org/a.mp4"


OF_FILES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}), ({"fps": 4.0}, {"mm_processor_kwargs": {"fps": 8}}, {"fps": 4.0}),
    ({}, {"mm_processor_kwargs": {"num_frames": 8}}, {"num_frames": 8}),
    ({}, {"mm_processor_kwargs": {"fps": 2, "do_sample_frames": True}}, {"fps": 2.0, "samples": True}),
    ({}, {"mm_processor_kwargs": {"do_sample_frames": False}}, {"samples": False}),
    ({}, {"mm_processor_kwargs": {"size": {"longest_edge": 9, "shortest_edge": 5}}}, {"min_pixels": 5, "max_pixels": 9}),
    ({"max_pixels": 7}, {"mm_processor_kwargs": {"max_pixels": 9}}, {"max_pixels": 7}),
]  # fmt: skip


OF_FRAMES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}), ({"fps": 2.0}, {"fps": 2.0}), ({"mm_processor_kwargs": {"fps": 9.0, "max_pixels": 9}}, {"max_pixels": 9}),
]  # fmt: skip


def test_what_is_said_of_a_video() -> None:
    for part, fields, expected in OF_FILES:
        found = reads({"type": "video_url", "video_url": {"url": URL, **part}}, **fields)
        assert found == VideoRef(file=MediaRef(url=URL), **expected), (part, fields)
    frames, jpegs = [MediaRef(url=f"https://x.org/{i}.jpg") for i in range(2)], "data:video/jpeg;base64,aa,bb"
    for fields, expected in OF_FRAMES:
        whole = {"mm_processor_kwargs": fields["mm_processor_kwargs"]} if "mm_processor_kwargs" in fields else {}
        own = {} if whole else fields
        found = reads({"type": "video", "video": [frame.url for frame in frames], **own}, **whole)
        assert found == VideoRef(frames=frames, **expected)
        found = reads({"type": "video_url", "video_url": jpegs, **own}, **whole)
        assert found == VideoRef(file=MediaRef(url=jpegs), holds_frames=True, **({"fps": 1.0} | expected))
    for part, fields in (
        ({"type": "video_url", "video_url": None}, {}), ({"type": "video", "video": ["a.mp4"]}, {}),
        ({"type": "video", "video": URL, "fps": 4.0}, {"mm_processor_kwargs": {"num_frames": 8}}),
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            reads(part, **fields)
        assert caught.value.info.status == 400 and (caught.value.info.param or "").startswith("messages[0].content[0]")


def test_every_way_to_send_frames(stack: Stack) -> None:

    def hashes(path: str, **body: Any) -> list[bytes]:
        answer = stack.http.post(path, json={"max_tokens": 9, **body} if "messages" in body else body)
        assert answer.status_code == 200, answer.text
        return [span.hash for span in last(stack).images]

    def of_chat(part: dict[str, object]) -> list[bytes]:
        return hashes("/v1/chat/completions", messages=user([part]))

    few = FRAMES[:4]
    joint = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + joined(few).decode()}}
    of_list = of_chat(listed(few))
    assert of_list == of_chat(joint) == of_chat(listed(few, fps=1.0)) and len(of_list) == 2
    block = {"type": "video", "source": {"type": "base64", "media_type": "video/mp4", "data": base64.b64encode(CLIP).decode()}}
    of_clip = hashes("/v1/messages", messages=user([block]))
    content = [{"type": "input_video", "video_url": uri(CLIP, "video/mp4")}]
    assert hashes("/v1/responses", input=user(content)) == of_clip
    assert of_chat({**video(CLIP), "uuid": "clip"}) == of_chat({"type": "video_url", "video_url": None, "uuid": "clip"}) == of_clip
    assert len(of_chat(video(gif(FRAMES[:5]), "image/gif"))) == 2
    refused = stack.chat([video(encode(FRAMES[:1]))])
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "invalid_video")
    assert error["message"].startswith("Video 1: ") and "at least 2 frames" in error["message"]
