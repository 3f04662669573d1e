"""Messages of a request in the processor's terms, and the media that they name."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.wire.messages import API_ARENA, MediaRef, Region, VideoRef
from server.http.body import Body
from server.http.scan import Scanner
from server.http.validate import Open, bad_value
from server.openai.fields import LIMITED_IN_IMAGES, check_limited
from server.openai.media import RATES, FramesPart, ImagePart, MediaIoKwargs, ProcessorKwargs, VideoIo, VideoOptions, VideoPart, merged
from server.openai.parts import Message, RefusalPart, TextPart
from server.openai.tools import CustomCall, ToolCall

JOINED_TYPE, JOINED_FPS = "video/jpeg", 1.0  # vLLM's: images with commas between; the rate where nobody tells it
URL_SCHEMES = ("http://", "https://", "file://", "data:")


@dataclass(slots=True)
class Conversation:
    """Messages for the chat template, and the media in the order in which it shows them."""

    messages: list[dict[str, object]]
    media: list[MediaRef | VideoRef]
    used_references: set[int]  # of the scanner's


def check_url(url: str, scanner: Scanner, path: str) -> None:
    """Raise RequestError 400 for a URL that no loader supports."""
    if scanner.index_of(url) is None and not url.lower().startswith(URL_SCHEMES):
        raise bad_value(path, "expected a data:, http://, https:// or file:// URL, such as 'data:image/jpeg;base64,/9j/4AAQ...'")


def check_urls(content: str | list[Any], name: str, scanner: Scanner) -> None:
    """Check the URLs of all parts of the content in field `name`, as `check_url`."""
    for j, part in enumerate(content if isinstance(content, list) else ()):
        for kind in {"image_url", "video_url"} & type(part).model_fields.keys():
            if (url := getattr(part, kind).url) is not None:
                check_url(url, scanner, f"{name}.{j}.{kind}")


def locate(url: str, path: str, body: Body, used: set[int]) -> tuple[Region | None, str | None]:
    """Return a payload in the api's arena, and mark its reference as used, or a URL. RequestError 400 as `check_url`."""
    check_url(url, body.scanner, path)
    index = body.scanner.index_of(url)
    if index is None:
        return None, url
    used.add(index)
    reference = body.scanner.references[index]
    return Region(API_ARENA, body.region.offset + reference.offset, reference.length), None


def read_conversation(
    messages: list[Message], body: Body, salt: str | None, limits: ProcessorKwargs | None, io: MediaIoKwargs | None = None
) -> Conversation:
    """Replaces every part with an image or a video by an index into the media; `limits` and `io` are of the whole request. Names of media
    are apart for each key that clients send, and for each salt. RequestError 400 for a URL that no loader knows."""
    owner = hashlib.sha256(body.credentials).digest() + hashlib.sha256((salt or "").encode()).digest()
    video = (io and io.video) or VideoIo()
    reader = _PartReader(body, owner, limits or ProcessorKwargs(), video, Conversation([], [], set()))
    for i, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        content: object = message.content or ""
        if isinstance(message.content, list):
            content = [reader.read(part, f"messages.{i}.content.{j}") for j, part in enumerate(message.content)]
        entry: dict[str, object] = {"role": role, "content": content}
        reasoning = message.reasoning_content or message.reasoning
        if reasoning is not None:
            entry["reasoning_content"] = reasoning
        if message.tool_calls:
            entry["tool_calls"] = [_read_call(call) for call in message.tool_calls]
        reader.conversation.messages.append(entry)
    return reader.conversation


def _read_call(call: ToolCall | CustomCall) -> dict[str, object]:
    """Return a call for the template: its arguments as an object, or as text if they are no JSON."""
    if isinstance(call, CustomCall):
        return {"type": "function", "function": {"name": call.custom.name, "arguments": {"input": call.custom.input}}}
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else arguments
    return {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}


@dataclass(slots=True)
class _PartReader:
    """Converter of content parts, which collects the media."""

    body: Body
    owner: bytes
    limits: ProcessorKwargs
    io: VideoIo
    conversation: Conversation
    mimes: dict[int, str] = field(default_factory=dict)  # of payloads, by offset

    def read(self, part: TextPart | RefusalPart | ImagePart | VideoPart | FramesPart, name: str) -> dict[str, object]:
        """Return the part as the template gets it. RequestError 400."""
        if isinstance(part, TextPart | RefusalPart):
            return {"type": "text", "text": part.text}
        media = self.conversation.media
        if isinstance(part, ImagePart):
            media.append(self._image(part, name))
            return {"type": "image", "media": len(media) - 1}
        media.append(self._video(part, name))
        return {"type": "video", "media": len(media) - 1}

    def _image(self, part: ImagePart, name: str) -> MediaRef:
        self._check_extra(part, part.image_url, f"{name}.image_url")
        least, most, cap = part.limits(self.limits)
        place = self._place(part.image_url.url, part.uuid, f"{name}.image_url", ".url")
        return msgspec.structs.replace(place, min_pixels=least, max_pixels=most, cap=cap)

    def _video(self, part: VideoPart | FramesPart, name: str) -> VideoRef:
        told: list[VideoOptions] = [part, self.limits]
        if isinstance(part, FramesPart):
            self._check_extra(part, part, f"{name}.video")
            if isinstance(part.video, list):
                frames = [self._place(url, None, f"{name}.video.{i}") for i, url in enumerate(part.video)]
                return self._frames(part, name, told, VideoRef(frames=frames))
            file = self._place(part.video, part.uuid, f"{name}.video")
        else:
            told.insert(0, part.video_url)
            self._check_extra(part, part.video_url, f"{name}.video_url")
            file = self._place(part.video_url.url, part.uuid, f"{name}.video_url", ".url")
        if self._holds_frames(file):
            return self._frames(part, name, told, VideoRef(file=file, holds_frames=True, source_fps=JOINED_FPS))
        for told_of, values in (("frames_indices", part.frames_indices), ("timestamps", part.timestamps)):
            if values is not None:
                raise bad_value(f"{name}.{told_of}", "is for frames that are sent one by one")
        return self._sampled(told, file)

    def _sampled(self, told: list[VideoOptions], file: MediaRef) -> VideoRef:
        """Return the reference to a file from which frames are sampled."""
        io, options = self.io, merged(told)
        if not options.keys() & RATES:
            options |= {"num_frames": io.num_frames} if (io.num_frames or 0) > 0 else {"fps": io.fps} if (io.fps or 0) > 0 else {}
        samples = options.pop("do_sample_frames", io.do_sample_frames)
        if io.num_frames == -1 and samples is None and not options.keys() & RATES:
            samples = False
        return VideoRef(file=file, samples=samples, max_frame_tokens=options.pop("max_tokens_per_frame", None), **options)

    def _frames(self, part: VideoPart | FramesPart, name: str, told: list[VideoOptions], ref: VideoRef) -> VideoRef:
        """Complete a reference to frames that the client has chosen; `fps` is the rate of their source. RequestError 400."""
        if any(one.do_sample_frames for one in told) or self.io.do_sample_frames:
            raise bad_value(f"{name}.do_sample_frames", "may only be false for frames: all of them are seen")
        if part.frames_indices is not None and part.timestamps is not None:
            raise bad_value(f"{name}.timestamps", "excludes `frames_indices`")
        for told_of, values in (("timestamps", part.timestamps), ("frames_indices", part.frames_indices)):
            if values is not None and values != sorted(values):
                raise bad_value(f"{name}.{told_of}", "must not descend")
        options, io_fps = merged(told), self.io.fps if (self.io.fps or 0) > 0 else None
        return msgspec.structs.replace(
            ref, source_fps=merged(told[:-1]).get("fps") or io_fps or ref.source_fps, times=part.timestamps, samples=False,
            indices=self.io.frames_indices if part.frames_indices is None else part.frames_indices,
            min_pixels=options.get("min_pixels"), max_pixels=options.get("max_pixels"),
            max_frame_tokens=options.get("max_tokens_per_frame"),
        )  # fmt: skip

    def _check_extra(self, part: Open, place: Open, name: str) -> None:
        for one, prefix in ((place, f"{name}."), (part, f"{name.rpartition('.')[0]}.")):
            check_limited(one.model_extra or {}, LIMITED_IN_IMAGES, prefix)

    def _place(self, url: str | None, uuid: str | None, name: str, field: str = "") -> MediaRef:
        """Return the reference to a medium. RequestError 400."""
        if url is None and uuid is None:
            raise bad_value(name, "may be null beside a `uuid` only")
        payload = None
        if url is not None:
            index = self.body.scanner.index_of(url)
            payload, url = locate(url, f"{name}{field}", self.body, self.conversation.used_references)
            if index is not None and payload is not None:
                self.mimes[payload.offset] = self.body.scanner.references[index].mime
        return MediaRef(payload, url, name=None if uuid is None else hashlib.sha256(self.owner + uuid.encode()).digest())

    def _holds_frames(self, file: MediaRef) -> bool:
        """Return whether the file is `data:video/jpeg`, frames separated by commas."""
        if file.payload is not None:
            return self.mimes[file.payload.offset].lower() == JOINED_TYPE
        return (file.url or "").lower().startswith(f"data:{JOINED_TYPE};")
