"""Clients from npm against the demo model: the JavaScript ones, and command lines with a model that is made to call their tools."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.asking import data_url
from tests.clients.command_lines import PACKAGES, TEMPLATE, TESTS
from tests.e2e.serving import Engine, serve

pytestmark = [pytest.mark.clients, pytest.mark.skipif(shutil.which("npm") is None, reason="the clients come from npm")]

VERSIONS = {"codex": "0.171.0", "claude": "2.1.332"}
SCRIPTS = {
    "openai": ["openai@6.49.0"],
    "anthropic": ["@anthropic-ai/sdk@1.13.0"],
    "ai_sdk": ["ai@6.0.326", "@ai-sdk/openai-compatible@2"],
}


def run(*command: str | Path, folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


def install(folder: Path, packages: list[str], is_newest: bool) -> None:
    names = [package[:1] + package[1:].partition("@")[0] + "@latest" for package in packages] if is_newest else packages
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    run("npm", "install", "--silent", "--no-audit", "--no-fund", "--foreground-scripts", *names, folder=folder)
    print(json.loads((folder / "package.json").read_text())["dependencies"])


@pytest.fixture(scope="module")
def agents_engine() -> Iterator[Engine]:
    with serve("demo", "--chat-template", str(TEMPLATE)) as running:
        yield running


@pytest.mark.parametrize("name", TESTS)
def test_command_line_answers_and_runs_a_tool(name: str, agents_engine: Engine, tmp_path: Path, is_newest: bool) -> None:
    install(tmp_path, [f"{PACKAGES[name]}@{VERSIONS[name]}"], is_newest)
    TESTS[name](tmp_path / "node_modules" / ".bin" / name, agents_engine.url, tmp_path)


@pytest.mark.parametrize("name", SCRIPTS)
def test_answers_streamed_and_not(name: str, engine: Engine, tmp_path: Path, is_newest: bool) -> None:
    install(tmp_path, SCRIPTS[name], is_newest)
    shutil.copy(Path(__file__).parent / "node" / f"{name}.js", tmp_path)
    run("node", f"{name}.js", engine.url, data_url(), folder=tmp_path)
