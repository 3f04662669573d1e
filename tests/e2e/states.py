"""Pictures of the page in five states, wide and narrow, light and dark: `python -m tests.e2e.states FOLDER`. Somebody looks at them."""

import asyncio
import json
import sys
from pathlib import Path

from tests.e2e.browser import Page, open_page
from tests.e2e.serving import serve
from tests.e2e.test_page import MARKED, SAME_DRAWINGS, ask

SIZES = {"narrow": (390, 844), "wide": (1200, 800)}
BOXES = '[{"bbox_2d": [300, 200, 700, 800], "label": "star"}, {"bbox_2d": [50, 60, 250, 300], "label": "corner"}]'


async def take(page: Page, folder: Path, state: str) -> None:
    for size, (width, height) in SIZES.items():  # the last one is that of what is done next
        for scheme in ("light", "dark"):
            await page.screenshot(folder / f"{state}-{size}-{scheme}.png", width, height, scheme)
            await page.evaluate("showTurns(); scrollDown(); true")  # as it is drawn in this size
            await page.screenshot(folder / f"{state}-{size}-{scheme}.png", width, height, scheme)


async def show(page: Page, text: str) -> None:
    """As if the model had said it to the last picture."""
    await page.evaluate(f"turns.at(-1).answer.text = {json.dumps(text)}; showTurns(); scrollDown(); true")


async def main(folder: Path) -> None:
    with serve("demo") as engine:
        async with open_page(engine.url + "/", SAME_DRAWINGS) as page:
            await page.wait("document.querySelector('#status.good')")
            await take(page, folder, "1-welcome")
            for _ in range(2):
                await page.click("#draw-number")
            await page.click("#draw-shape")
            await take(page, folder, "2-composing")
            await ask(page, "List the numbers in all pictures in order.")
            await ask(page, "Count to 20.")
            await take(page, folder, "3-answered")
            await page.evaluate("setQuestion('')")
            await page.click("#draw-shape")
            await ask(page, "What shape is in picture 4?")
            await show(page, BOXES)
            await take(page, folder, "4-boxes")
            await show(page, MARKED)
            await page.evaluate("setStatus('cannot be reached', false); showProblem('The server cannot be reached. Is it still running?')")
            await take(page, folder, "5-markdown-and-a-problem")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
