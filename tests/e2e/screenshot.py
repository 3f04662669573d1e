"""Takes the README's picture of the page: `python -m tests.e2e.screenshot`. A real exchange with the demo model, in a real Chromium."""

import asyncio
from pathlib import Path

from tests.e2e.browser import open_page
from tests.e2e.serving import ROOT, serve
from tests.e2e.test_page import SAME_DRAWINGS, ask

TARGET = ROOT / "server/http/page.png"
WIDTH, HEIGHT = 1200, 800


async def take(target: Path) -> None:
    with serve("demo") as engine:
        async with open_page(engine.url + "/", SAME_DRAWINGS) as page:
            await page.screenshot(target, WIDTH, HEIGHT)  # sets the size of the window
            await page.wait("document.querySelector('#status.good')")
            for _ in range(3):
                await page.click("#draw-number")
            await ask(page, "List the numbers in all pictures in order.")
            await page.click("#draw-shape")
            await ask(page, "Describe picture 4.")
            await page.screenshot(target, WIDTH, HEIGHT)


if __name__ == "__main__":
    asyncio.run(take(TARGET))
