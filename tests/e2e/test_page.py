"""The page at `/` in a real Chromium, with the demo model behind it: what a newcomer does, clicks and keys included."""

import base64
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from models.demo import CHECKPOINT
from models.scaffold import SHAPES, write_model_folder
from tests.e2e.browser import CHROMIUM, Page, open_page
from tests.e2e.drawing import drawn
from tests.e2e.serving import Engine, serve
from tests.unit.server.clips import encode as encode_video
from tests.unit.server.clips import frames_of
from tests.unit.server.stack import Stack, answer_ids

no_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: install Debian's package chromium")
pytestmark = [pytest.mark.browser, no_browser]

ANSWERS = "all('.theirs').map(node => node.querySelector('.text').textContent)"
NUMBERS = (
    "all('.theirs').map(node => "
    "Object.fromEntries([...node.querySelectorAll('.numbers div')].map(row => [...row.children].map(cell => cell.textContent))))"
)
SAME_DRAWINGS = "let state = 7; Math.random = () => (state = state * 48271 % 2147483647) / 2147483647;"
STOP_EARLY = (  # inside the page: the answer takes a quarter of a second
    "new MutationObserver((_, observer) => { if ($('.theirs .text')?.textContent.length > 8) {"
    "$('#stop').click(); observer.disconnect(); } }).observe($('#log'),"
    "{childList: true, subtree: true, characterData: true})"
)
READY = "$('#status.good')"
ATTACHED = "all('#attached img').map(image => image.alt)"
DONE = "$('.theirs') && !$('.theirs[aria-busy=\"true\"]')"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with serve(CHECKPOINT, "--dtype", "float32") as engine:
        yield engine


@pytest.fixture
async def page(engine: Engine) -> AsyncIterator[Page]:
    async with open_page(engine.url + "/", SAME_DRAWINGS) as page:
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
    await page.press("Enter")
    await page.wait(DONE)


async def test_pictures_from_files_over_several_turns(page: Page, tmp_path: Path) -> None:
    await attach(page, *drawn(tmp_path))
    await ask(page, "What number is in picture 1?")
    await ask(page, "What colour is the star in picture 2?")
    assert await page.evaluate(ANSWERS) == ["472", "red"]
    first, second = await page.evaluate(NUMBERS)
    assert first.keys() == {"First token", "Tokens", "Cached prompt", "Cached pictures"}  # and no speed of two tokens
    assert first["Cached pictures"] == "0 of 2" and second["Cached pictures"] == "2 of 2"
    assert first["Cached prompt"].startswith("0 of ") and int(second["Cached prompt"].split()[0]) >= 16
    assert int(first["First token"].removesuffix(" ms")) > 0 and int(first["Tokens"]) >= 2


async def test_drawn_pictures_are_counted_over_turns_and_can_be_removed(page: Page) -> None:
    for button in ("#draw-number", "#draw-shape", "#draw-number"):
        await page.click(button)
    await page.click("#attached .thumb:nth-child(2) button")
    labels = await page.evaluate(ATTACHED)
    first, second = (label.split("number ")[1].split()[0] for label in labels)
    await ask(page, "List the numbers in all pictures in order.")
    await page.click("#draw-shape")
    (label,) = await page.evaluate(ATTACHED)
    assert label.startswith("Picture 3: ")
    await ask(page, "What shape is in picture 3?")
    assert await page.evaluate(ANSWERS) == [f"{first}, {second}", label.split()[-1]]
    await page.click("#new")
    assert await page.evaluate("!$('.turn') && !$('#welcome').hidden")
    await ask(page, "hello")
    assert "demo" in (await page.evaluate(ANSWERS))[0]


async def test_every_example_is_answered(page: Page) -> None:
    examples = [f"#examples li:nth-child({i}) button" for i in (1, 2, 3)] + ["#words button:first-of-type", "#words button:last-of-type"]
    for example in examples:
        await page.click(example)
        await page.wait(DONE)
        assert all(await page.evaluate(ANSWERS))
        await page.click("#new")


async def test_stop_drop_and_words_for_errors(page: Page, engine: Engine) -> None:
    """Red if an error of the API is not shown in words, or its turn is not given back."""
    await page.evaluate(STOP_EARLY)
    await ask(page, "Count to 30.")
    assert (await page.evaluate(NUMBERS))[0]["Ended"] == "stopped by you"
    (text,) = await page.evaluate(ANSWERS)
    assert text.startswith("1, 2, 3") and not text.endswith("30")
    broken = (
        "(() => { const data = new DataTransfer(); data.items.add(new File(['no picture'], 'photo.png', {type: 'image/png'}));"
        "data.items.add(new File(['text'], 'notes.txt', {type: 'text/plain'}));"
        "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})); })()"
    )
    await page.evaluate(broken)
    problem = await page.wait("$('#problem').textContent")
    assert problem == "No picture or video: notes.txt. Broken, or of a kind that cannot be read: photo.png. Remove it to send the question."
    await page.click("#question")
    await page.type("What is in this picture?")
    await page.press("Enter")
    assert await page.evaluate("$('#send').disabled && all('.mine').length === 1")
    for _ in range(2):
        await page.click("#attached .rejected button")
    assert await page.evaluate("!$('#send').disabled && $('#problem').hidden")
    await page.evaluate("setQuestion('')")
    await page.click("#settings summary")
    await page.click("#temperature")
    await page.type("200")
    await ask(page, "What is in this picture?")
    problem = await page.wait("$('#problem').textContent")
    assert problem.startswith("temperature")
    assert await page.evaluate("$('#question').value") == "What is in this picture?"
    assert len(await page.evaluate(ANSWERS)) == 1
    page.complaints.clear()  # the browser logs the 400


SENT = (
    "let sent = []; const plainSend = XMLHttpRequest.prototype.send;"
    "XMLHttpRequest.prototype.send = function (body) { sent.push(body); plainSend.call(this, body); };"
)
COPIED = "let copied = []; Object.defineProperty(navigator, 'clipboard', {value: {writeText: async text => { copied.push(text); }}});"


async def test_settings_and_copies(engine: Engine, tmp_path: Path) -> None:
    async with open_page(engine.url + "/", SENT + COPIED + SAME_DRAWINGS) as page:
        await page.wait(READY)
        await page.click("#settings summary")
        for field, value in (("#system", "Be short."), ("#temperature", "0"), ("#max-tokens", "7")):
            await page.click(field)
            await page.type(value)
        await page.click("#draw-number")
        await ask(page, 'What number is in picture 1? It\'s "one".')
        (body,) = [json.loads(text) for text in await page.evaluate("sent")]
        assert (body["messages"][0], body["temperature"], body["max_tokens"]) == ({"role": "system", "content": "Be short."}, 0, 7)
        for i in (1, 2, 3):
            await page.click(f".theirs .actions button:nth-child({i})")
        await page.wait("copied.length === 3")
        answer, curl, python = await page.evaluate("copied")
        assert [answer] == await page.evaluate(ANSWERS) and answer.isdigit()
        for command in (["bash", "-c", curl], [sys.executable, "-c", python]):
            said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
            assert (json.loads(said)["choices"][0]["message"]["content"] if said.startswith("{") else said.strip()) == answer
        assert not page.complaints


async def test_a_video_plays_and_is_seen(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "clip.webm"
    path.write_bytes(encode_video(frames_of(20, 120, 160), "webm", "libvpx-vp9"))
    await page.choose_files("#files", [path])
    await page.wait("$('#attached video')?.videoWidth === 160")
    await ask(page, "What is this?")
    (numbers,) = await page.evaluate(NUMBERS)
    assert (numbers["Frames read"], numbers["Pictures and frame pairs encoded"]) == ("4", "2")
    duration = await page.wait("$('.mine video').duration")  # NaN, which comes as None, until its head is read
    assert duration == pytest.approx(2, abs=0.1)


async def test_pictures_by_paste(page: Page, tmp_path: Path) -> None:
    path = drawn(tmp_path)[0]
    data = base64.b64encode(path.read_bytes()).decode()
    await page.evaluate(
        f"(() => {{ const bytes = Uint8Array.from(atob('{data}'), letter => letter.charCodeAt(0)), data = new DataTransfer();"
        f"data.items.add(new File([bytes], 'a.png', {{type: 'image/{path.suffix[1:]}'}}));"
        "document.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true})); })()"
    )
    await page.wait("all('#attached .thumb').length === 1")
    await ask(page, "What number is in picture 1?")
    assert await page.evaluate(ANSWERS) == ["472"]


async def test_a_phone(page: Page, tmp_path: Path) -> None:
    await page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    await fits(page)
    await page.click("#settings summary")
    await attach(page, *drawn(tmp_path))
    await fits(page)
    await ask(page, "What number is in picture 1?")
    assert await page.evaluate(ANSWERS) == ["472"]
    await fits(page)


async def fits(page: Page) -> None:
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth && innerWidth === 360")
    outside = (
        "all('button, input, textarea, a, summary')"
        ".filter(node => node.checkVisibility() && !node.matches('.hidden'))"
        ".map(node => [node.id || node.textContent, node.getBoundingClientRect()])"
        ".filter(([, box]) => box.left < 0 || box.right > innerWidth || box.height < 16).map(([name]) => name)"
    )
    assert await page.evaluate(outside) == []


async def test_api_key(tmp_path: Path) -> None:
    with serve(CHECKPOINT, "--api-key", "open sesame") as engine:
        async with open_page(engine.url + "/") as page:
            await page.wait("$('#status').textContent === 'needs an API key'")
            assert await page.evaluate("document.activeElement.id") == "key"
            await ask_without_key(page)
            await page.click("#key")
            await page.type("open ")
            await page.press("Enter")
            await page.wait("$('#status').textContent === 'needs another API key'")
            await page.evaluate("$('#key').select()")
            await page.type("open sesame")
            await page.press("Enter")
            await page.wait(READY)
            await page.click("#send")
            await page.wait(DONE)
            assert "demo" in (await page.evaluate(ANSWERS))[0]
            stored = await page.evaluate("JSON.stringify([Object.entries(localStorage), sessionStorage.length, document.cookie])")
            assert "hello" in stored and "sesame" not in stored and stored.endswith(',0,""]')


async def ask_without_key(page: Page) -> None:
    await page.click("#question")
    await page.type("hello")
    await page.press("Enter")
    assert "API key" in await page.wait("$('#problem').textContent")


@pytest.fixture
def speaker(tmp_path: Path) -> Iterator[tuple[str, Callable[..., None]]]:
    """The address of a server, and a function that sets its next answer."""
    write_model_folder(tmp_path, SHAPES["tiny"], weights="none", seed=0)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stack = Stack(tmp_path)

    def say(text: str, **options: str) -> None:
        stack.scheduler.script = answer_ids(tokenizer.encode(text).ids, **options)

    yield stack.url, say
    stack.close()


async def test_thoughts_stand_apart(speaker: tuple[str, Callable[..., None]]) -> None:
    url, say = speaker
    say("<think>\nHm,\nwell.\n</think>\n\nYes.")
    async with open_page(url + "/") as page:
        await page.wait(READY)
        await ask(page, "really?")
        assert await page.evaluate(ANSWERS) == ["Yes."]
        assert await page.evaluate("$('.thoughts').textContent") == "Hm,\nwell.\n"
        assert await page.evaluate("messagesOf(turns).at(-1)") == {"role": "assistant", "content": "Yes."}
        say("<think>\nHm, well, on and on", reason="length")
        await page.click("#question")
        await page.type("and then?")
        await page.press("Enter")
        await page.wait("$('#problem').textContent.includes('token limit')")
        assert await page.evaluate(ANSWERS) == ["Yes."]


async def test_a_conversation_survives_a_reload_and_can_be_changed(page: Page) -> None:
    await page.click("#draw-number")
    await ask(page, "What number is in picture 1?")
    await page.click("#draw-number")
    await ask(page, "What number is in picture 2?")
    answers = await page.evaluate(ANSWERS)
    await page.call("Page.reload")
    await page.wait("all('.theirs').length === 2 && $('#status.good')")
    assert await page.evaluate(ANSWERS) == answers
    await page.evaluate("turns.at(-1).answer.isOld = true")
    await page.click(".turn:last-child .actions button:last-child")  # retry
    await page.wait("!running && turns.length === 2 && !turns.at(-1).answer.isOld")
    assert await page.evaluate(ANSWERS) == answers
    await page.click(".mine:first-child .actions button:first-child")  # edit
    assert await page.evaluate("[all('.old').length, all('#attached .thumb').length]") == [4, 1]
    await page.press("Escape")
    assert await page.evaluate("[all('.old').length, turns.length, el.question.value]") == [0, 2, ""]
    await page.click(".mine:first-child .actions button:first-child")
    await page.evaluate("setQuestion('')")
    await ask(page, "How many pictures are there?")
    assert await page.evaluate(ANSWERS) == ["1"]
    await page.click(".mine .actions button:last-child")  # delete
    assert await page.evaluate("[turns.length, localStorage.length, $('#welcome').hidden]") == [0, 0, False]


async def test_progress_of_an_upload_and_the_servers_speed(page: Page, tmp_path: Path) -> None:
    await ask(page, "Count to 20.")
    assert (await page.evaluate(NUMBERS))[-1]["Speed"].endswith(" tokens/s")
    noise = np.random.default_rng(1).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")  # 480 KB, 640 KB as it is sent
    await attach(page, tmp_path / "noise.png")
    conditions = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 400_000}
    await page.call("Network.emulateNetworkConditions", **conditions)
    await page.evaluate(
        "var phases = new Set(); new MutationObserver(() => phases.add($('.theirs:last-child .phase')?.textContent))"
        ".observe(el.log, {childList: true, subtree: true, characterData: true}); true"
    )
    await ask(page, "Describe picture 1.")
    phases = await page.evaluate("[...phases]")
    assert "Reading" in phases and [phase for phase in phases if phase and phase.startswith("Sending ")], phases


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
    await page.evaluate(f"$('#log').append(...markdown({json.dumps(MARKED)}))")
    tags = await page.evaluate("all('#log *').map(node => node.tagName.toLowerCase())")
    assert tags == [
        "h3", "p", "strong", "em", "code", "a", "a", "ol", "li", "li", "ul", "li", "li", "pre", "code", "table", "thead", "tr", "th", "th",
        "tbody", "tr", "td", "td", "code", "blockquote", "p",
    ]  # fmt: skip
    text = await page.evaluate("$('#log').textContent")
    assert "<img src=x onerror=alert(1)>" in text and 'x = "**no**"' in text
    assert await page.evaluate("all('#log a').map(link => link.href)") == ["https://example.org/x", ""]


async def test_chats_are_listed_opened_and_deleted(page: Page) -> None:
    titles = "all('#list li').map(node => node.firstChild.textContent)"
    await ask(page, "hello")
    await page.click("#new")
    await ask(page, "Count to 20.")
    assert await page.evaluate(titles) == ["Count to 20.", "hello"]
    await page.call("Page.reload")
    await page.wait("all('.theirs').length === 1 && $('#status.good')")
    await page.evaluate("all('#list li')[1].firstChild.click()")
    assert await page.evaluate("[$('.mine .text').textContent, $('#list .current').firstChild.textContent]") == ["hello", "hello"]
    for left in (["Count to 20."], []):
        await page.evaluate("$('#list li:last-child').lastChild.click()")
        assert await page.evaluate(titles) == left
    assert await page.evaluate("[$('#chats').hidden, $('#welcome').hidden, localStorage.length]") == [True, False, 0]


async def test_the_tile_of_a_video_is_large_and_a_pdf_gets_advice(page: Page) -> None:
    drop = "await attachFiles([new File(['%PDF'], 'a.pdf', {type: 'application/pdf'})])"
    await page.evaluate(f"(async () => {{ {drop}; }})()")
    assert "Save its pages as pictures" in await page.evaluate("$('#problem').textContent")
    await page.evaluate("attached = [{url: 'data:video/webm;base64,', kind: 'video', label: 'clip'}]; showAttached()")
    assert await page.evaluate("$('#attached video').getBoundingClientRect().width") >= 236


async def test_boxes_are_drawn_on_the_picture(speaker: tuple[str, Callable[..., None]]) -> None:
    url, say = speaker
    say('[{"bbox_2d": [100, 250, 500, 750], "label": "star <b>"}, {"bbox_2d": "no"}]')
    async with open_page(url + "/", SAME_DRAWINGS) as page:
        await page.wait(READY)
        await page.click("#draw-shape")
        await ask(page, "Where?")
        await page.wait("$('.boxed rect')")
        widths = "['img', 'svg'].map(name => $('.boxed ' + name).getBoundingClientRect().width)"
        assert await page.evaluate(widths) == [224, 224]
        sides = "['x', 'y', 'width', 'height'].map(name => $('.boxed rect').getAttribute(name))"
        assert await page.evaluate(sides) == ["100", "250", "400", "500"]
        assert await page.evaluate("$('.boxed svg').getAttribute('viewBox')") == "0 0 1000 1000"
        assert await page.evaluate("$('.boxed figcaption').textContent") == "star <b>"
        await page.click(".mine .thumb img")
        assert await page.evaluate("$('#large').open")
        await page.press("Escape")
        await page.wait("!$('#large').open")
        assert not page.complaints


async def test_a_server_that_is_gone_and_back(tmp_path: Path) -> None:
    with serve(CHECKPOINT) as first:
        port = first.url.rsplit(":", 1)[1]
        context = open_page(first.url + "/")
        page = await context.__aenter__()
        await page.wait(READY)
    try:
        await page.evaluate("watchServer()")
        await page.wait("$('#status.bad')")
        with serve(CHECKPOINT, "--port", port):
            await page.wait("$('#status.good') && el.problem.textContent === 'The server is back.'")
    finally:
        await context.__aexit__(None, None, None)


def test_the_page_allows_itself_only(engine: Engine) -> None:
    response = httpx.get(engine.url + "/")
    policy = dict(directive.split(" ", 1) for directive in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'" and "unsafe" not in json.dumps(policy)
    markup = re.sub(r"(?s)<script>.*?</script>", "", response.text)
    loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*\s(?:src|href)=\"(?!data:)", markup)
    assert response.headers["content-type"].startswith("text/html") and not loaded
