"""The documentation says what is so: paths, modules and flags that it names exist, and generated pages are what the code says."""

import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from bench import tables
from bench.flags import FLAGS
from engine.launch.compat import ALIASES, IGNORED, KEYS, REFUSALS
from engine.launch.flags import make_parser
from engine.wire.config import EngineConfig
from engine.wire.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASED, MAX_STOP_IDS, MAX_TOP_LOGPROBS
from server.api.chat.adapters import AdapterRoutes
from server.api.chat.status import StatusRoutes
from server.api.dialects.updates import WeightUpdates
from server.api.http.body import MAX_TEXT_BYTES
from server.api.http.connection import BODY_SECONDS, HEAD_SECONDS, MAX_HEAD_BYTES
from server.api.http.registry import MAX_PROMPTS_BYTES
from server.api.main import ENDPOINTS
from server.api.schema import parts
from server.api.schema import requests as schema
from server.api.schema.validate import MAX_VALUES
from server.processor.intake import MAX_PROMPT_SCORES
from server.processor.media.decoders import LARGE_PIXELS
from server.processor.media.fetch import MAX_PER_HOST, MAX_REDIRECTS

ROOT = Path(__file__).parents[2]
OTHER_PAGES = [ROOT / "models/demo/checkpoint/README.md"]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *OTHER_PAGES])
TOP = ("engine", "server", "models", "tests", "bench", "docs", "deploy", ".github", ".ci")
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULE = re.compile(r"python -m ((?:engine|server|models|bench|tests)[\w.]*)")
ADDED = re.compile(r"add(?:_argument|option)\(\s*\"(--[\w-]+)\"")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def named_paths(text: str) -> set[str]:
    """Paths of this project in code. `NAME` is for the reader to fill in; `path.py:word` points into a file."""
    spans = {span.split(":")[0] for span in CODE.findall(FENCE.sub("", text))}
    found = {span for span in spans if span.split("/")[0] in TOP and re.fullmatch(r"[\w./-]+/[\w./-]*", span)}
    return {span for span in found if "NAME" not in span}


def test_paths_links_and_modules_of_pages_exist() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        links = [link.split("#")[0] for link in LINK.findall(FENCE.sub("", text)) if "://" not in link and not link.startswith("#")]
        modules = {name.rstrip(".") for name in MODULE.findall(text) if "NAME" not in name}
        missing += [(name_of(page), path) for path in sorted(named_paths(text)) if not (ROOT / path).exists()]
        missing += [(name_of(page), link) for link in links if not (page.parent / link).exists()]
        missing += [(name_of(page), name) for name in sorted(modules) if importlib.util.find_spec(name) is None]
    assert not missing


def test_the_core_has_the_sizes_that_the_page_states() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## The core")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+/)` \| (.*) \| (\d+) \|$", page, re.MULTILINE)
    sizes = [sum(len((ROOT / folder / name).read_text(encoding="utf-8")) for name in CODE.findall(names)) for folder, names, _ in rows]
    assert rows and not [row for row, size in zip(rows, sizes, strict=True) if abs(size / 1000 / int(row[2]) - 1) > 0.1]


def test_generated_pages_are_current() -> None:
    """Run `python docs/generate.py` after a change of a flag or a field."""
    generate, texts = generator(), {name: (ROOT / name).read_text(encoding="utf-8") for name in generator().PAGES}
    assert sorted(name for text in texts.values() for _, name, _ in tables.MARKED.findall(text)) == sorted(generate.TABLES)
    for name, text in texts.items():
        assert text == tables.rendered(name, generate.TABLES), "run python docs/generate.py"


def test_flags_of_pages_exist() -> None:
    known = {"--gpus", "--init", "--shm-size", "--target", "--build", "--build-arg", "--hypothesis-profile", "--dist"}  # of other programs
    known |= {"--profile", "--from-literal", "--local-dir", "--wheel-dir", "--no-deps", "--tasks", "--apply_chat_template", "--model_args"}
    known |= {"--confcutdir", *(f"--{name}" for name in FLAGS)}  # of benchmarks
    known |= {*ALIASES, *IGNORED, *KEYS, *REFUSALS}
    known |= {*make_parser()._option_string_actions, *ADDED.findall(source_text("engine", "server", "models", "bench", "tests"))}
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):
        text = page.read_text(encoding="utf-8")
        spans = " ".join([*CODE.findall(FENCE.sub("", text)), *FENCE.findall(text)])
        assert not set(re.findall(r"(?<![\w-])--[a-z][\w-]+", spans)) - known, name_of(page)


@cache
def source_text(*folders: str) -> str:
    text = "".join(path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return re.sub(r"\"\s*\n\s*f?\"", "", text).replace('\\"', '"')


def test_messages_of_troubleshooting_are_the_programs_own() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 30
    source = source_text("engine", "server", "models")
    fragments = {part.strip(" .") for row in rows for part in row.split("…")}
    assert not [part for part in sorted(fragments) if len(part) > 1 and part not in source]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links and anchors between pages lead somewhere, and no link leaves the site for a file of the repository."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    run = subprocess.run(command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "one bad request fails alone" in (tmp_path / "site/security/index.html").read_text(encoding="utf-8")
    assert not list((tmp_path / "site").rglob("generate*"))
    pages = [page for page in (tmp_path / "site").rglob("*.html") if page.name != "404.html"]  # whose links begin at the host's root
    links = {(page, link) for page in pages for link in re.findall(r'href="([^"#?:]+)[#?"]', page.read_text(encoding="utf-8"))}
    assert len(links) > 100 and not [(page.parent.name, link) for page, link in links if not (page.parent / link).exists()]


def test_limits_of_the_api_page_are_those_of_the_code() -> None:
    section = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition("## Limits")[2].partition("\n## ")[0]
    config = EngineConfig()
    sizes = MAX_TEXT_BYTES, MAX_PROMPTS_BYTES, config.max_body_bytes, config.max_download_bytes
    numbers = [
        *(f"{size >> 20} MiB" for size in sizes),
        *(f"{count:,}" for count in (MAX_VALUES, config.max_connections, config.max_queued_requests, config.max_num_encoder_tokens)),
        *(f"{seconds} s" for seconds in (int(HEAD_SECONDS), config.idle_timeout, int(BODY_SECONDS), config.decode_timeout)),
        f"{LARGE_PIXELS >> 20} megapixels",
        f"{MAX_HEAD_BYTES >> 10} KiB", f"{config.max_image_pixels // 10**6} million", f"| {config.max_images_per_request} |",
        f"{MAX_PROMPT_SCORES:,}",
        f"{MAX_REDIRECTS} redirects, {config.download_connect_timeout} s to connect, {config.download_timeout} s in all",
        f"{MAX_PER_HOST} at once from a host",
        f"{schema.MAX_ANSWERS}; {MAX_TOP_LOGPROBS}; {MAX_BIASED}; {MAX_BAD_WORDS // 2} of {MAX_BAD_WORD_TOKENS} tokens",
        f"{schema.MAX_MESSAGES:,}; {parts.MAX_TOOLS:,}; {schema.MAX_STOPS} of {schema.MAX_STOP_CHARACTERS} characters; {MAX_STOP_IDS}; ",
        f"{MAX_STOP_IDS}; {schema.MAX_PROMPTS}",
    ]  # fmt: skip
    assert not [number for number in numbers if number not in section]


def test_every_endpoint_is_on_the_api_page() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition("## Requests")[0]
    told = set(re.findall(r"`(?:GET|POST|DELETE) (/[^`]*)`", page))
    nothing: Any = None
    status = [route for route in StatusRoutes(nothing).routes()]
    routes = {route.path for route in status} | set(ENDPOINTS) | {"/", "/openapi.json"}
    annexes = WeightUpdates, AdapterRoutes
    routes |= {route.path for annex in annexes for route in annex.__new__(annex).routes()}
    assert told == {path.replace("{name:path}", "NAME").replace("{name}", "ID") for path in routes}


def test_tables_are_those_of_the_results() -> None:
    """Run `python -m bench tables` after a change of a result."""
    for name in tables.PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert len(tables.MARKED.findall(text)) == text.count("<!-- table: ") >= 1, name
        assert text == tables.rendered(name), f"{name}: run python -m bench tables"


def test_every_result_says_where_it_comes_from() -> None:
    kept = {f"{path.parent.name}/{path.stem}" for folder in tables.GPUS for path in tables.RESULTS.glob(f"{folder}/*.json")}
    assert len(kept) > len(tables.served()) > 10
    for name in sorted(kept):
        for run in (run for runs in tables.content(name) for run in tables.runs(name, runs)):
            origin = run["environment"]
            assert re.fullmatch(r"[0-9a-f]{7,40}", run["commit"]), name
            assert origin["gpus"] and origin["versions"]["torch"] and "python -m bench" in origin["command"], name
    references = tables.content("references")
    assert references["conditions"] and references["runs"] and all(each["versions"] for of in references["models"].values() for each in of)
