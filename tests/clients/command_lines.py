"""Codex CLI and Claude Code against the demo model: they start, get an answer, and run what the model is made to call.

The demo model sees only what a user typed (`last_words.jinja`), not the agents' long instructions. `Insisting`, between them and the
server, makes it call a tool.
"""

import contextlib
import http.server
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.clients.asking import NUMBER

TEMPLATE = Path(__file__).with_name("last_words.jinja")
PACKAGES = {"codex": "@openai/codex", "claude": "@anthropic-ai/claude-code"}
COMMAND = "echo 472"
TIMEOUT_S = 120
QUESTION = "What number is in picture 1?"
HEADERS = ("content-type", "authorization", "accept", "x-api-key")


def run(command: list[str], folder: Path, **environment: str) -> str:
    environment = {**os.environ, "HOME": str(folder), **environment}
    options: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": TIMEOUT_S}
    done = subprocess.run(command, cwd=folder, env=environment, check=False, **options)
    assert done.returncode == 0, f"{command[0]}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def codex(executable: Path, url: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    (folder / "codex").mkdir(exist_ok=True)
    provider = f'[model_providers.local]\nname = "local"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    (folder / "codex" / "config.toml").write_text(f'model = "demo"\nmodel_provider = "local"\n{provider}')
    command = [str(executable), "exec", "--json", "--skip-git-repo-check", "-s", "danger-full-access", *arguments]
    return lines(run(command, folder, CODEX_HOME=str(folder / "codex")))


def claude(executable: Path, url: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), "demo")
    command = [str(executable), "-p", "--output-format", "stream-json", "--verbose", *arguments]
    return lines(run(command, folder, ANTHROPIC_BASE_URL=url, ANTHROPIC_AUTH_TOKEN="none", DISABLE_AUTOUPDATER="1", **models))


def test_codex(executable: Path, url: str, folder: Path) -> None:
    def finished(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
        items = [event["item"] for event in events if event["type"] == "item.completed"]
        return [item for item in items if item["type"] == kind]

    (answer,) = finished(codex(executable, url, folder, "-i", str(NUMBER), "--", QUESTION), "agent_message")
    assert answer["text"] == "472", answer
    with insisting(url) as other_url:
        events = codex(executable, other_url, folder, "-i", str(NUMBER), "--", QUESTION)
    (call,) = finished(events, "command_execution")
    assert COMMAND in call["command"] and call["aggregated_output"] == "472\n", call
    assert finished(events, "agent_message")[-1]["text"] == "472"


def test_claude(executable: Path, url: str, folder: Path) -> None:
    def blocks(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
        messages = [event["message"]["content"] for event in events if event["type"] in ("assistant", "user")]
        return [block for content in messages if isinstance(content, list) for block in content if block["type"] == kind]

    events = claude(executable, url, folder, "How are you?")
    assert events[-1]["subtype"] == "success" and blocks(events, "text")[-1]["text"] == events[-1]["result"] != "", events[-1]
    with insisting(url) as other_url:
        events = claude(executable, other_url, folder, "--allowedTools", "Bash(echo:*)", "--", "How are you?")
    (use,), (result,) = blocks(events, "tool_use"), blocks(events, "tool_result")
    assert (use["name"], use["input"]["command"]) == ("Bash", COMMAND) and "472" in str(result["content"]), (use, result)
    assert events[-1]["subtype"] == "success", events[-1]


TESTS = {"codex": test_codex, "claude": test_claude}


def insist(path: str, body: dict[str, Any]) -> None:
    """The model must call the tool that runs commands, with COMMAND, unless it has done so."""
    if path.startswith("/v1/responses") and not any(item.get("type") == "function_call_output" for item in body["input"]):
        tool = next(tool for tool in body["tools"] if tool.get("name") in ("exec_command", "shell_command", "shell"))
        name = "cmd" if "cmd" in tool["parameters"]["properties"] else "command"
        tool["parameters"] = only(name)
        body["tool_choice"] = {"type": "function", "name": tool["name"]}
    elif path.startswith("/v1/messages") and "tool_result" not in json.dumps(body["messages"]):
        tool = next((tool for tool in body.get("tools", []) if tool["name"] == "Bash"), None)
        if tool is not None:
            tool["input_schema"] = only("command")
            body["tool_choice"] = {"type": "tool", "name": "Bash"}


def only(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"enum": [COMMAND]}}, "required": [name], "additionalProperties": False}


@contextlib.contextmanager
def insisting(url: str) -> Iterator[str]:
    """Another server's address, which changes requests by `insist` and passes them on."""

    class Insisting(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            insist(self.path, body)
            headers = {name: self.headers[name] for name in HEADERS if name in self.headers}
            with httpx.stream("POST", url + self.path, json=body, headers=headers, timeout=TIMEOUT_S) as answer:
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers["content-type"])
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # Claude Code asks for a title, too, and does not wait for it
                    for piece in answer.iter_raw():
                        self.wfile.write(piece)

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Insisting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
