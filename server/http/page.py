"""The page at `/`: `page.html` as it is, under a policy that lets it talk to this server only. Routed to by `server/http/app.py`."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).with_name("page.html")


class Page:
    """The page's bytes and headers, read once."""

    def __init__(self) -> None:
        self._content = PAGE.read_bytes()
        self._headers = {
            "Content-Security-Policy": content_security_policy(self._content.decode()),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    async def show(self, request: Request) -> Response:
        """`GET /`. Needs no API key: the page asks for it and sends it with its own requests."""
        return Response(self._content, headers=self._headers, media_type="text/html; charset=utf-8")


def content_security_policy(html: str) -> str:
    """Nothing but the page's own script and style may run, named by their hashes; nothing is loaded from, or sent to, anywhere else."""
    return (
        f"default-src 'none'; script-src {_hashes(html, 'script')}; style-src {_hashes(html, 'style')}; "
        "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(html: str, tag: str) -> str:
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
