"""A client that openapi-python-client generates from the server's document asks the demo model."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.asking import question
from tests.e2e.serving import Engine

pytest.importorskip("openapi_python_client")

pytestmark = pytest.mark.clients


def test_a_generated_client(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--url", f"{engine.url}/openapi.json", "--meta", "none"]
    subprocess.run([*command, "--output-path", str(tmp_path / "generated_client")], check=True, timeout=120)
    monkeypatch.syspath_prepend(tmp_path)
    client: Any = importlib.import_module("generated_client")
    models: Any = importlib.import_module("generated_client.models")
    chat: Any = importlib.import_module("generated_client.api.default.post_v1_chat_completions")
    body = models.ChatRequest.from_dict({"messages": question(), "max_tokens": 8, "temperature": 0.0})
    answer = chat.sync_detailed(client=client.AuthenticatedClient(base_url=engine.url, token="none"), body=body)
    assert answer.status_code == 200 and json.loads(answer.content)["choices"][0]["message"]["content"] == "472"
