"""The page at `/`: page.html with its style and scripts, under a policy that lets it talk to this server only.

vendor/ holds marked (Markdown to HTML) and DOMPurify (removes what answers must not contain), as published.
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import HTMLResponse, Response

from server.api.chat.routes import DescribedRoute

FOLDER = Path(__file__).parent


def page_route() -> DescribedRoute:
    html = re.sub(r"\{([\w./]+)\}", lambda name: _text(name[1]), _text("page.html"))
    # Only the page's own script and style may run; nothing is loaded from or sent to other origins.
    policy = (
        f"default-src 'none'; script-src {_hashes(html, 'script')}; style-src {_hashes(html, 'style')}; "
        "img-src data: blob:; media-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    content, headers = html.encode(), {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
    headers |= {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}

    async def show() -> Response:
        """Return the chat page. It is served without an API key; it asks the user for the key and sends it with requests."""
        return HTMLResponse(content, headers=headers)

    return DescribedRoute("/", show)


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hashes(html: str, tag: str) -> str:
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
