"""References to a request's media: payloads in its body, URLs, or names of earlier media."""

import hashlib
from typing import Any

from engine.wire.messages import API_ARENA, MediaRef, Region
from server.api.http.body import Body
from server.api.http.scan import Scanner
from server.api.schema.fields import LIMITED_IN_IMAGES, check_limited
from server.api.schema.validate import Open, bad_value

URL_SCHEMES = ("http://", "https://", "file://", "data:")


def check_url(url: str, scanner: Scanner, path: str) -> None:
    """Raise RequestError 400 for a URL that no loader supports."""
    if scanner.index_of(url) is None and not url.lower().startswith(URL_SCHEMES):
        raise bad_value(path, "expected a data:, http://, https:// or file:// URL, such as 'data:image/jpeg;base64,/9j/4AAQ...'")


def check_urls(content: str | list[Any], name: str, scanner: Scanner) -> None:
    """Check the URLs of all parts of the content in field `name`, as `check_url`."""
    for j, part in enumerate(content if isinstance(content, list) else ()):
        for kind in type(part).model_fields:
            if kind.endswith("_url") and (url := getattr(part, kind).url) is not None:
                check_url(url, scanner, f"{name}.{j}.{kind}")


def media_ref(url: str, path: str, body: Body, name: bytes | None = None) -> MediaRef:
    """Return the reference to a medium in the field `path`: to a payload in the api's arena, which is marked as used, or to a URL.
    RequestError 400 as `check_url`."""
    check_url(url, body.scanner, path)
    index = body.scanner.index_of(url)
    if index is None:
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
        """Return the reference to a medium in the part `name`. RequestError 400."""
        if url is None and uuid is None:
            raise bad_value(name, "may be null only with a `uuid`")
        owned = None if uuid is None else hashlib.sha256(self._owner + uuid.encode()).digest()
        return MediaRef(name=owned) if url is None else media_ref(url, f"{name}{field}", self._body, owned)

    def has_type(self, url: str, mime: str) -> bool:
        """Return whether `url` is a payload of this type."""
        scanner = self._body.scanner
        index = scanner.index_of(url)
        return url.lower().startswith(f"data:{mime};") if index is None else scanner.references[index].mime.lower() == mime


def check_extra(part: Open, place: Open, name: str) -> None:
    """Check further members of a part and of its URL object `name`. RequestError 400."""
    for one, prefix in ((place, f"{name}."), (part, f"{name.rpartition('.')[0]}.")):
        check_limited(one.model_extra or {}, LIMITED_IN_IMAGES, prefix)
