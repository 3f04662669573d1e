"""A headless Chromium with one page, driven through the DevTools protocol: `async with open_page() as page`. Used by `test_page`."""

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.eventually import HANG_GUARD_S, eventually_async

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-port=0",
)


SHORT = "var $ = selector => document.querySelector(selector), all = selector => [...document.querySelectorAll(selector)];"


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket = socket
        self._ids = itertools.count(1)
        self._replies = {}
        self._reader = asyncio.create_task(self._read())
        self.requests = []
        self.complaints = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        reply = await asyncio.wait_for(self._replies[number], HANG_GUARD_S)
        assert "error" not in reply, (method, reply["error"])
        return dict(reply["result"])

    async def evaluate(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait(self, expression: str) -> Any:
        found = []

        async def look() -> bool:
            found.append(await self.evaluate(expression))
            return found[-1] not in (None, False, 0, "")

        await eventually_async(look, expression)
        return found[-1]

    async def open(self, url: str, script: str = "") -> None:
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            await self.call(f"{domain}.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=SHORT + script)
        await self.call("Page.navigate", url=url)
        await self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    async def click(self, selector: str) -> None:
        where = (
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView({{block: 'nearest'}});"
            "const box = node.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        x, y = await self.evaluate(where)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")

    async def choose_files(self, selector: str, paths: list[Path]) -> None:
        root = await self.call("DOM.getDocument")
        found = await self.call("DOM.querySelector", nodeId=root["root"]["nodeId"], selector=selector)
        await self.call("DOM.setFileInputFiles", nodeId=found["nodeId"], files=[str(path) for path in paths])

    async def close(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            await self.call("Browser.close")
        self._reader.cancel()

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                self._replies.pop(data["id"]).set_result(data)
            elif data["method"] == "Network.requestWillBeSent":
                self.requests.append(data["params"]["request"]["url"])
            elif data["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(data["params"]["exceptionDetails"]))
            elif data["method"] == "Log.entryAdded" and data["params"]["entry"]["level"] == "error":
                self.complaints.append(str(data["params"]["entry"]))


@contextlib.asynccontextmanager
async def open_page(url: str, script: str = "") -> AsyncIterator[Page]:
    """A fresh browser that shows `url`; it can resolve no name, and nothing of it is left at the end."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="engine-test-browser-", ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(CHROMIUM, *flags, "about:blank", stdout=quiet, stderr=quiet)
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(await _tab_of(session, Path(profile)), max_msg_size=0) as socket,
            ):
                page = Page(socket)
                await page.open(url, script)
                yield page
                await page.close()
            await asyncio.wait_for(process.wait(), HANG_GUARD_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _tab_of(session: aiohttp.ClientSession, profile: Path) -> str:
    found = []

    async def look() -> bool:
        with contextlib.suppress(FileNotFoundError, IndexError, aiohttp.ClientError):
            port = (profile / "DevToolsActivePort").read_text().splitlines()[0]
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                found.extend(str(tab["webSocketDebuggerUrl"]) for tab in await response.json() if tab["type"] == "page")
        return bool(found)

    await eventually_async(look, "the first tab of the browser")
    return found[0]
