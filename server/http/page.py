"""The page at `/`: `page.html` as it is, under a policy that lets it talk to this server only."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import HTMLResponse, Response

from server.openai.openapi import DescribedRoute

PAGE = Path(__file__).with_name("page.html")


class Page:
    def __init__(self) -> None:
        self._content = PAGE.read_bytes()
        html = self._content.decode()
        # Nothing but the page's own script and style may run; nothing is loaded from, or sent to, anywhere else.
        policy = (
            f"default-src 'none'; script-src {_hashes(html, 'script')}; style-src {_hashes(html, 'style')}; "
            "img-src data: blob:; media-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
        self._headers |= {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}

    def route(self) -> DescribedRoute:
        return DescribedRoute("/", self.show, "GET", response_class=HTMLResponse)

    async def show(self) -> Response:
        """A page to try the model. It needs no API key: it asks for it and sends it with its own requests."""
        return HTMLResponse(self._content, headers=self._headers)


def _hashes(html: str, tag: str) -> str:
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
