"""Codex CLI and Claude Code of pinned versions, from npm, against a model that is made to call their tools."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.command_lines import PACKAGES, TEMPLATE, TESTS
from tests.clients.newest import install_node
from tests.e2e.serving import Engine, serve

pytestmark = pytest.mark.clients

VERSIONS = {"codex": "0.171.0", "claude": "2.1.332"}


@pytest.fixture(scope="module")
def agents_engine() -> Iterator[Engine]:
    with serve("demo", "--chat-template", str(TEMPLATE)) as running:
        yield running


@pytest.mark.skipif(shutil.which("npm") is None, reason="the command lines come from npm")
@pytest.mark.parametrize("name", TESTS)
def test_command_line_answers_and_runs_a_tool(name: str, agents_engine: Engine, tmp_path: Path) -> None:
    install_node([f"{PACKAGES[name]}@{VERSIONS[name]}"], tmp_path)
    TESTS[name](tmp_path / "node_modules" / ".bin" / name, agents_engine.url, tmp_path)
