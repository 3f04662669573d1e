"""Images in the content of messages, and references to media: payloads in the body, URLs, or names of earlier media."""

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field

from engine.wire.messages import API_ARENA, MediaRef, Region
from server.api.http.body import Body
from server.api.schema.validate import Strict, bad_value

LOW_DETAIL_PIXELS = 512 * 512
URL_SCHEMES = ("http://", "https://", "file://", "data:")

Detail = Literal["auto", "low", "high", "original"]
Pixels = Annotated[int, Field(ge=1, lt=1 << 31)]
Uuid = Annotated[str, Field(min_length=1, max_length=1024)]


def media_ref(url: str, path: str, body: Body, name: bytes | None = None) -> MediaRef:
    """Return the reference to a medium in the field `path`: to a payload in the api's arena, which is marked as used, or to a URL.
    RequestError 400 for a URL that no loader supports."""
    index = body.scanner.index_of(url)
    if index is None:
        if not url.lower().startswith(URL_SCHEMES):
            raise bad_value(path, "expected a data:, http://, https:// or file:// URL, such as 'data:image/jpeg;base64,/9j/4AAQ...'")
        return MediaRef(url=url, name=name)
    body.scanner.used.add(index)
    reference = body.scanner.references[index]
    return MediaRef(Region(API_ARENA, body.region.offset + reference.offset, reference.length), name=name)


class MediaRefs:
    """References to the media of one request. Names of media are separate for each key that clients send, and for each salt."""

    def __init__(self, body: Body, salt: str | None):
        self._body = body
        self._owner = hashlib.sha256(body.credentials).digest() + hashlib.sha256((salt or "").encode()).digest()

    def of(self, url: str | None, uuid: str | None, name: str, field: str = "") -> MediaRef:
        if url is None and uuid is None:
            raise bad_value(name, "may be null only with a `uuid`")
        owned = None if uuid is None else hashlib.sha256(self._owner + uuid.encode()).digest()
        return MediaRef(name=owned) if url is None else media_ref(url, f"{name}{field}", self._body, owned)

    def has_type(self, url: str, mime: str) -> bool:
        scanner = self._body.scanner
        index = scanner.index_of(url)
        return url.lower().startswith(f"data:{mime};") if index is None else scanner.references[index].mime.lower() == mime


class PixelLimits(Strict):
    """Limits on the area after resizing, in total over all frames. None: the checkpoint's limit."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None

    @classmethod
    def merged(cls, *options: "PixelLimits") -> dict[str, Any]:
        """Return the fields of this class in all options; the first option that sets a field takes precedence."""
        return {name: value for one in reversed(options) for name, value in one if name in cls.model_fields and value is not None}


class PixelSizes(Strict):
    """transformers' names of `min_pixels` and `max_pixels`."""

    model_config = ConfigDict(extra="forbid")

    shortest_edge: Pixels | None = None
    longest_edge: Pixels | None = None


class ImageUrl(PixelLimits):
    """Location of an image. `detail: low` is at most LOW_DETAIL_PIXELS, `high` and `auto` are as the checkpoint has it."""

    url: str | None = None
    detail: Detail | None = None


def url_object(value: object) -> object:
    return {"url": value} if isinstance(value, str | None) else value


NO_URL: Any = Field(default=None, validate_default=True)


class ImagePart(PixelLimits):
    """An image. Later requests with the same `uuid` may leave out the URL."""

    type: Literal["image_url", "input_image"]
    image_url: Annotated[ImageUrl, BeforeValidator(url_object, json_schema_input_type=ImageUrl | str | None)] = NO_URL
    detail: Detail | None = None  # form of the Responses API
    uuid: Uuid | None = None

    def reference(self, name: str, refs: MediaRefs, limits: PixelLimits) -> MediaRef:
        """Return the processor's reference. Limits next to the URL take precedence, then the part's, then `limits`. RequestError 400."""
        bounds = PixelLimits.merged(self.image_url, self, limits)
        cap = LOW_DETAIL_PIXELS if "low" in (self.image_url.detail, self.detail) else None
        return msgspec.structs.replace(refs.of(self.image_url.url, self.uuid, f"{name}.image_url", ".url"), cap=cap, **bounds)
