"""Clients that are generated from the OpenAPI document, in Python and TypeScript, ask the demo model: `python -m tests.clients.generators`.

Needs Node.js and a package index; what it installs is gone afterwards.
"""

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.clients.asking import data_url
from tests.e2e.serving import Engine, serve

PYTHON_PACKAGES = ["openapi-python-client==0.29.1", "openapi-spec-validator==0.9.0"]
NODE_PACKAGES = ["openapi-typescript@7.13.0", "openapi-fetch@0.17.0", "typescript@5.9.3"]
PYTHON = """
import sys
from generated import AuthenticatedClient, models
from generated.api.default import get_health, get_v1_models, post_tokenize, post_v1_chat_completions, post_v1_messages

client = AuthenticatedClient(base_url=sys.argv[1], token="none")
picture = models.ImagePart(type_="image_url", image_url=sys.argv[2])
question = models.TextPart(type_=models.TextPartType.TEXT, text="What number is in picture 1?")
picture.type_ = models.ImagePartType.IMAGE_URL
message = models.Message(role=models.MessageRole.USER, content=[picture, question])
answer = post_v1_chat_completions.sync(client=client, body=models.ChatRequest(messages=[message], temperature=0, max_tokens=8))
assert answer.choices[0].message.content == "472" and answer.usage.completion_tokens > 0, answer
refused = post_v1_chat_completions.sync(client=client, body=models.ChatRequest(messages=[message], temperature=-1))
assert isinstance(refused, models.ErrorAnswer) and refused.error.param == "temperature", refused
turn = models.Turn(role=models.TurnRole.USER, content="What number?")
said = post_v1_messages.sync(client=client, body=models.MessagesRequest(messages=[turn], max_tokens=4))
assert isinstance(said, models.MessageAnswer) and said.usage.output_tokens > 0, said
assert get_v1_models.sync(client=client).data[0].id == "demo"
assert get_health.sync(client=client).status == "ok"
"""
TYPESCRIPT = """
import createClient from "openapi-fetch";
import type { paths } from "./schema.js";

const client = createClient<paths>({ baseUrl: process.argv[2] });
const part = { type: "image_url" as const, image_url: process.argv[3] };
const text = { type: "text" as const, text: "What number is in picture 1?" };
const body = { messages: [{ role: "user" as const, content: [part, text] }], temperature: 0, max_tokens: 8 };
const { data, error } = await client.POST("/v1/chat/completions", { body });
if (error || !("choices" in data) || data.choices[0].message.content !== "472") throw new Error(JSON.stringify(error ?? data));
const models = await client.GET("/v1/models");
if (models.data?.data[0].id !== "demo") throw new Error("no model");
"""


def run(*command: str | Path, folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True)


def ask_in_python(engine: Engine, folder: Path) -> None:
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    run(python, "-m", "pip", "install", "-q", *PYTHON_PACKAGES, folder=folder)
    validate = "import json; from openapi_spec_validator import validate; validate(json.load(open('openapi.json')))"
    run(python, "-c", validate, folder=folder)
    (folder / "config.yaml").write_text("package_name_override: generated\n")
    generate = ("generate", "--path", "openapi.json", "--config", "config.yaml", "--meta", "none", "--output-path", "generated")
    run(python, "-m", "openapi_python_client", *generate, folder=folder)
    (folder / "ask.py").write_text(PYTHON)
    run(python, "ask.py", engine.url, data_url(), folder=folder)


def ask_in_typescript(engine: Engine, folder: Path) -> None:
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    run("npm", "install", "--silent", "--no-audit", "--no-fund", *NODE_PACKAGES, folder=folder)
    run("npx", "openapi-typescript", "openapi.json", "-o", "schema.ts", folder=folder)
    (folder / "ask.ts").write_text(TYPESCRIPT.replace("process.argv", "(globalThis as any).process.argv"))
    run("npx", "tsc", "--strict", "--target", "es2022", "--module", "nodenext", "--skipLibCheck", "ask.ts", folder=folder)
    run("node", "ask.js", engine.url, data_url(), folder=folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, serve("demo") as engine:
        folder = Path(name)
        document = engine.client.get("/openapi.json").json()
        (folder / "openapi.json").write_text(json.dumps(document))
        ask_in_python(engine, folder)
        ask_in_typescript(engine, folder)
    print("both generated clients were answered")


if __name__ == "__main__":
    sys.exit(main())
