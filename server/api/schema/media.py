"""Images in the content of messages."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field

from engine.wire.messages import MediaRef
from server.api.schema.media_refs import MediaRefs, check_extra
from server.api.schema.validate import Open, Strict

LOW_DETAIL_PIXELS = 512 * 512

Detail = Literal["auto", "low", "high", "original"]
Pixels = Annotated[int, Field(ge=1, lt=1 << 31)]
Uuid = Annotated[str, Field(min_length=1, max_length=1024)]


class PixelLimits(Strict):
    """Limits on the area after resizing, in total over all frames. None: the checkpoint's limit."""

    alternatives: ClassVar[frozenset[str]] = frozenset()  # mutually exclusive fields

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None

    @classmethod
    def merged(cls, *options: "PixelLimits") -> dict[str, Any]:
        """Return the fields of this class in all options; the first option that sets a field takes precedence. Of `alternatives`, only
        those of one option apply."""
        result: dict[str, Any] = {}
        for one in reversed(options):
            given = {name: value for name, value in one if name in cls.model_fields and value is not None}
            excluded = cls.alternatives if given.keys() & cls.alternatives else ()
            result = {name: value for name, value in result.items() if name not in excluded} | given
        return result


class PixelSizes(Strict):
    """transformers' names of `min_pixels` and `max_pixels`."""

    model_config = ConfigDict(extra="forbid")

    shortest_edge: Pixels | None = None
    longest_edge: Pixels | None = None


class ImageUrl(PixelLimits, Open):
    """Location of an image. Further members are accepted if they change nothing: see LIMITED_IN_IMAGES.

    `detail: low` is at most LOW_DETAIL_PIXELS, `high` and `auto` are as the checkpoint has it."""

    url: str | None
    detail: Detail | None = None


def url_object(value: object) -> object:
    return {"url": value} if isinstance(value, str | None) else value


NO_URL: Any = Field(default=None, validate_default=True)


class ImagePart(PixelLimits, Open):
    """An image. Later requests with the same `uuid` may leave out the URL."""

    type: Literal["image_url", "input_image"]
    image_url: Annotated[ImageUrl, BeforeValidator(url_object, json_schema_input_type=ImageUrl | str | None)] = NO_URL
    detail: Detail | None = None  # form of the Responses API
    uuid: Uuid | None = None

    def reference(self, name: str, refs: MediaRefs, limits: PixelLimits, io: object) -> MediaRef:
        """Return the processor's reference. Limits next to the URL take precedence, then the part's, then `limits`. RequestError 400."""
        check_extra(self, self.image_url, f"{name}.image_url")
        bounds = PixelLimits.merged(self.image_url, self, limits)
        cap = LOW_DETAIL_PIXELS if "low" in (self.image_url.detail, self.detail) else None
        return msgspec.structs.replace(refs.of(self.image_url.url, self.uuid, f"{name}.image_url", ".url"), cap=cap, **bounds)
