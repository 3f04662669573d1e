"""The page at `/` in a real Chromium, with the demo model: what a newcomer does, clicks and keys included."""

import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from models.demo import CHECKPOINT
from tests.e2e.browser import CHROMIUM, Page, open_page
from tests.e2e.drawing import drawn
from tests.e2e.serving import Engine, serve
from tests.unit.server.clips import encode as encode_video
from tests.unit.server.clips import frames_of

no_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: install Debian's package chromium")
pytestmark = [pytest.mark.browser, no_browser]

ANSWERS = "all('.theirs').map(node => node.querySelector('.text').textContent.trim())"
TIMINGS = "all('.timings').map(node => node.firstChild.textContent.split(' · '))"
COPIED = "let copied = []; document.execCommand = () => copied.push(document.activeElement.value);"
READY = "$('#status.good')"
DONE = "$('.theirs') && !$('.theirs[aria-busy=\"true\"]')"
PROBLEM = "$('#problem').textContent"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with serve(CHECKPOINT, "--dtype", "float32") as engine:
        yield engine


@pytest.fixture
async def page(engine: Engine) -> AsyncIterator[Page]:
    async with open_page(engine.url + "/", COPIED) as page:
        await page.wait(READY)
        yield page
        assert not page.complaints
        foreign = [url for url in page.requests if not url.startswith((engine.url + "/", "data:"))]
        assert not foreign, "a request left the origin"


async def attach(page: Page, *paths: Path) -> None:
    await page.choose_files("#files", list(paths))
    await page.wait(f"all('#attached .thumb').length === {len(paths)}")


async def ask(page: Page, question: str) -> None:
    await page.click("#question")
    await page.type(question)
    await page.press_enter()
    await page.wait(DONE)


async def test_pictures_from_files_over_several_turns(page: Page, tmp_path: Path) -> None:
    number, star = drawn(tmp_path)
    await attach(page, star, number)
    await page.click("#attached .thumb:first-child button")
    await ask(page, "What number is in picture 1?")
    await attach(page, star)
    assert await page.evaluate("$('#attached img').alt.split(':')[0]") == "Picture 2"
    await ask(page, 'What colour is the star in "picture 2"?')
    assert await page.evaluate(ANSWERS) == ["472", "red"]
    first, second = await page.evaluate(TIMINGS)
    assert re.fullmatch(r"First token [1-9]\d* ms", first[0]) and re.fullmatch(r"\d+ tokens", first[1]) and len(first) == 3
    assert first[2].startswith("0 of ") and int(second[2].split()[0]) >= 16
    await page.click(".theirs:last-child .timings button")
    (curl,) = await page.evaluate("copied")
    output = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(output)["choices"][0]["message"]["content"] == "red"
    await page.click("#new")
    assert await page.evaluate("!$('.turn') && !$('#welcome').hidden")
    await ask(page, "hello")
    assert "demo" in (await page.evaluate(ANSWERS))[0]


async def test_errors_are_shown_in_words(page: Page) -> None:
    await page.evaluate(
        "(() => { const data = new DataTransfer(); data.items.add(new File(['no picture'], 'photo.png', {type: 'image/png'}));"
        "data.items.add(new File(['text'], 'notes.txt', {type: 'text/plain'}));"
        "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})); })()"
    )
    assert await page.wait(PROBLEM) == "notes.txt is not a readable picture or video."
    await page.click("#question")
    await page.type("What is in this picture?")
    await page.press_enter()
    assert (await page.wait("$('#problem').textContent.includes('mage') && $('#problem').textContent")).startswith("Image 1")
    assert await page.evaluate("[$('#question').value, all('#attached .thumb').length, all('.turn').length]") == [
        "What is in this picture?", 1, 0,
    ]  # fmt: skip
    page.complaints.clear()  # the browser logs the 4xx


async def test_a_video_plays_and_is_read(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "clip.webm"
    path.write_bytes(encode_video(frames_of(20, 120, 160), "webm", "libvpx-vp9"))
    await attach(page, path)
    await page.wait("$('#attached video')?.videoWidth === 160")
    await ask(page, "What is this?")
    assert all(await page.evaluate(ANSWERS))
    duration = await page.wait("$('.mine video').duration")  # NaN, which is null in JSON, until its head is read
    assert duration == pytest.approx(2, abs=0.1)


async def test_api_key(tmp_path: Path) -> None:
    with serve(CHECKPOINT, "--api-key", "open sesame") as engine:
        async with open_page(engine.url + "/", COPIED) as page:
            await page.wait("$('#status').textContent === 'needs an API key'")
            assert await page.evaluate("document.activeElement.id") == "key"
            await page.click("#question")
            await page.type("hello")
            await page.press_enter()
            assert "API key" in await page.wait(PROBLEM)
            await page.click("#key")
            await page.type("open sesame")
            await page.press_enter()
            await page.wait(READY)
            await page.click("#send")
            await page.wait(DONE)
            assert "demo" in (await page.evaluate(ANSWERS))[0]
            await page.click(".timings button")
            assert await page.evaluate("copied[0].includes('$API_KEY') && !copied[0].includes('sesame')")
            assert await page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


MARKED = r"""# Title
**bold** and *slanted*, `code <b>` and [a link](https://example.org/x), [no link](javascript:alert(1))
<img src=x onerror=alert(1)>

1. one
2. two

- a
- b

```python
x = "**no**"
```

| a | b |
|---|---|
| 1 | `2` |

> said"""


async def test_markdown_is_shown_and_html_is_not(page: Page) -> None:
    await page.evaluate(f"$('#log').append(markdown({json.dumps(MARKED)}))")
    tags = await page.evaluate("all('#log *').map(node => node.tagName.toLowerCase())")
    assert tags == [
        "h1", "p", "strong", "em", "code", "a", "a", "ol", "li", "li", "ul", "li", "li", "pre", "code", "table", "thead", "tr", "th", "th",
        "tbody", "tr", "td", "td", "code", "blockquote", "p",
    ]  # fmt: skip
    text = await page.evaluate("$('#log').textContent")
    assert "<img src=x onerror=alert(1)>" in text and 'x = "**no**"' in text
    assert await page.evaluate("all('#log a').map(link => link.href)") == ["https://example.org/x", ""]


def test_the_page_allows_itself_only(engine: Engine) -> None:
    response = httpx.get(engine.url + "/")
    policy = dict(directive.split(" ", 1) for directive in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'" and "unsafe" not in json.dumps(policy)
    markup = re.sub(r"(?s)<script>.*?</script>", "", response.text)
    loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*\s(?:src|href)=\"(?!data:)", markup)
    assert response.headers["content-type"].startswith("text/html") and not loaded
