"""The documentation says what is so: paths, modules and flags that it names exist, and generated pages are what the code says."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHER_PAGES = [ROOT / "bench/results/NOTES.md", ROOT / "models/demo/checkpoint/README.md"]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *OTHER_PAGES])
TOP = ("engine", "server", "models", "tests", "bench", "docs", "deploy", ".github", ".ci")
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULE = re.compile(r"python -m ((?:engine|server|models|bench|tests)[\w.]*)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def named_paths(text: str) -> set[str]:
    """Whatever stands in code as a path of this project. `NAME` is for the reader to fill in; `path.py:word` points into a file."""
    spans = {span.split(":")[0] for span in CODE.findall(FENCE.sub("", text))}
    found = {span for span in spans if span.split("/")[0] in TOP and re.fullmatch(r"[\w./-]+/[\w./-]*", span)}
    return {span for span in found if "NAME" not in span}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_and_links_of_a_page_exist(page: Path) -> None:
    """Red if a file moves and a page does not follow."""
    text = page.read_text(encoding="utf-8")
    assert not [path for path in sorted(named_paths(text)) if not (ROOT / path).exists()]
    links = [link.split("#")[0] for link in LINK.findall(FENCE.sub("", text)) if "://" not in link and not link.startswith("#")]
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_modules_of_a_page_exist(page: Path) -> None:
    """Red if a command of a page would not start."""
    modules = {name.rstrip(".") for name in MODULE.findall(page.read_text(encoding="utf-8"))}
    assert not [name for name in modules if "NAME" not in name and importlib.util.find_spec(name) is None]


def test_a_missing_path_would_be_found() -> None:
    """Red if the search above stops finding anything: a check of nothing is always green."""
    assert named_paths("`engine/nowhere.py` and `server/NAME.py`, `--flag`, `a/b`") == {"engine/nowhere.py"}
    assert len(named_paths((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))) > 50
