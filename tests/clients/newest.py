"""The newest versions of clients that pip and npm give, against the demo model: `python -m tests.clients.newest [NAME ...]`.

CI tests the pinned ones. Prints the table of docs/clients.md. Needs package indexes and, for what runs on it, Node.js; without them a row
says so. What it installs is gone afterwards. Takes about ten minutes.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.clients import command_lines
from tests.clients.asking import data_url
from tests.e2e.serving import ROOT, serve

TESTERS = ["pytest", "pytest-asyncio", "pytest-timeout", "httpx", "numpy", "pillow", "pydantic"]
INSTALL_S, TEST_S = 900, 600
PYTHON = {  # packages, the first of which gives the version, and the file of tests
    "openai": (["openai"], "test_openai.py"),
    "openai, responses": (["openai"], "test_responses.py"),
    "anthropic": (["anthropic"], "test_anthropic.py"),
    "LiteLLM": (["litellm", "openai"], "test_litellm.py"),
    "LangChain": (["langchain-openai"], "test_langchain.py"),
    "Pydantic AI": (["pydantic-ai-slim[openai]"], "test_pydantic_ai.py"),
    "instructor": (["instructor"], "test_instructor.py"),
    "outlines": (["outlines", "openai"], "test_outlines.py"),
    "guidance": (["guidance", "openai"], "test_guidance.py"),
    "openapi-python-client": (["openapi-python-client"], "test_generated.py"),
}
SEE = "function see(text) { if (text.trim() !== '472') throw new Error(text); }\n"
OPENAI = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const url = process.argv[3], question = "What number is in picture 1?";
const content = [{ type: "image_url", image_url: { url } }, { type: "text", text: question }];
const asked = { model: "demo", messages: [{ role: "user", content }], temperature: 0, max_tokens: 8, reasoning_effort: "low" };
see((await client.chat.completions.create(asked)).choices[0].message.content);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) text += chunk.choices[0]?.delta.content ?? "";
see(text);
const input = [{ role: "user", content: [{ type: "input_image", image_url: url }, { type: "input_text", text: question }] }];
see((await client.responses.create({ model: "demo", input, temperature: 0, max_output_tokens: 8 })).output_text);
"""
ANTHROPIC = """
import Anthropic from "@anthropic-ai/sdk";
const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const source = { type: "base64", media_type: "image/png", data: process.argv[3].split(",")[1] };
const content = [{ type: "image", source }, { type: "text", text: "What number is in picture 1?" }];
const asked = { model: "demo", messages: [{ role: "user", content }], max_tokens: 8 };
see((await client.messages.create(asked)).content[0].text);
see((await client.messages.stream(asked).finalMessage()).content[0].text);
"""
AI_SDK = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
const model = createOpenAICompatible({ name: "local", baseURL: process.argv[2] + "/v1" })("demo");
const image = Buffer.from(process.argv[3].split(",")[1], "base64");
const content = [{ type: "image", image }, { type: "text", text: "What number is in picture 1?" }];
const options = { local: { reasoningEffort: "high" } };
const asked = { model, messages: [{ role: "user", content }], temperature: 0, maxRetries: 0, providerOptions: options };
see((await generateText(asked)).text);
see(await streamText(asked).text);
"""
NODE = {
    "openai (npm)": (["openai"], OPENAI),
    "@anthropic-ai/sdk": (["@anthropic-ai/sdk"], ANTHROPIC),
    "AI SDK": (["ai", "@ai-sdk/openai-compatible"], AI_SDK),
}
COMMAND_LINES = {"Codex CLI": "codex", "Claude Code": "claude"}


def run(command: list[str | Path], folder: Path, seconds: float) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode != 0:
        print((done.stdout + done.stderr).strip()[-2000:], file=sys.stderr)
    done.check_returncode()
    return done.stdout


def in_python(name: str, url: str, folder: Path) -> tuple[str, str]:
    packages, file = PYTHON[name]
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    run([python, "-m", "pip", "install", "-q", "--no-compile", *packages, *TESTERS], folder, INSTALL_S)
    bare = packages[0].partition("[")[0]
    version = run([python, "-c", f"import importlib.metadata as m; print(m.version({bare!r}))"], folder, TEST_S).strip()
    options = ["--engine-url", url, "--confcutdir", "tests/clients", "-m", "", "-p", "no:cacheprovider", "--tb=short"]
    try:
        said = run([python, "-m", "pytest", f"tests/clients/{file}", *options], ROOT, TEST_S).strip()
    except subprocess.CalledProcessError as failure:
        said = failure.stdout.strip()
    return version, ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", said.splitlines()[-1])) or "failed"


def install_node(packages: list[str], folder: Path) -> str:
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--foreground-scripts", *packages], folder, INSTALL_S)
    bare = packages[0][:1] + packages[0][1:].partition("@")[0]
    version: str = json.loads((folder / "node_modules" / bare / "package.json").read_text())["version"]
    return version


def in_node(name: str, url: str, folder: Path) -> tuple[str, str]:
    packages, script = NODE[name]
    version = install_node(packages, folder)
    (folder / "ask.js").write_text(script + SEE)
    try:
        run(["node", "ask.js", url, data_url()], folder, TEST_S)
    except subprocess.CalledProcessError:
        return version, "failed"
    return version, "answers, streamed and not"


def on_the_command_line(name: str, url: str, folder: Path) -> tuple[str, str]:
    command = COMMAND_LINES[name]
    version = install_node([command_lines.PACKAGES[command]], folder)
    executable = folder / "node_modules" / ".bin" / command
    try:
        command_lines.TESTS[command](executable, url, folder)
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        print(failure, file=sys.stderr)
        return version, "failed"
    return version, "starts, answers, runs a call"


def rows(names: list[str]) -> Iterator[tuple[str, str, str]]:
    template = ["--chat-template", str(command_lines.TEMPLATE)]
    kinds: list[tuple[list[str], Callable[[str, str, Path], tuple[str, str]], list[str]]] = [
        ([*PYTHON], in_python, []), ([*NODE], in_node, []), ([*COMMAND_LINES], on_the_command_line, template),
    ]  # fmt: skip
    for clients, ask, flags in kinds:
        chosen = [client for client in clients if not names or client in names]
        if chosen and ask is not in_python and shutil.which("npm") is None:
            yield from ((client, "", "not run: no npm") for client in chosen)
            continue
        if chosen:
            with serve("demo", *flags) as engine:
                for client in chosen:
                    with tempfile.TemporaryDirectory() as folder:
                        try:
                            yield client, *ask(client, engine.url, Path(folder))
                        except subprocess.SubprocessError:  # the index, or the machine, not the client
                            yield client, "", "not installed"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*PYTHON, *NODE, *COMMAND_LINES, []], metavar="NAME")
    print(f"Run on {time.strftime('%Y-%m-%d')}.\n\n| client | version | result |\n|---|---|---|")
    for row in rows(parser.parse_args().names):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
