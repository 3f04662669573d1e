"""Who gets in: API keys, names of the server, and the separate port for metrics."""

import asyncio
import resource
from pathlib import Path

import httpx
import pytest

from engine.flags import parse_args
from tests.unit.server.in_process import client_of, serving, virtual
from tests.unit.server.stack import Stack


@virtual
async def test_each_of_several_keys_opens_and_nothing_else_does(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of clients\nfirst\n\n  sécond  \n")
    with serving(model_folder, api_key="own", api_key_file=str(file)) as api:
        for key in ("own", "first", "sécond"):
            for headers in ({"Authorization": f"bearer {key}".encode()}, {"x-api-key": key.encode()}):
                assert (await api.http.get("/v1/models", headers=headers)).status_code == 200, key
        for wrong in ("", "# of clients", "of clients", "firs", "own first", "own,first", "None"):
            response = await api.http.get("/v1/models", headers={"x-api-key": wrong})
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), wrong
        for path in ("/v1/models", "/metrics", "/version", "/v1/chat/completions", "/health/../v1/models", "/nowhere", "/HEALTH"):
            for headers in ({}, {"Authorization": ""}, {"Authorization": "Basic own"}):
                assert (await api.http.get(path, headers=headers)).status_code == 401, path
        page = await api.http.get("/")  # it asks for the key itself
        assert page.status_code == 200 and "wants an API key" in page.text and 'id="key"' in page.text
        assert "first" not in (await api.http.get("/server_info", headers={"x-api-key": "own"})).text


def test_a_file_without_a_key_stops_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    for content, words in ((None, "there is no file"), ("# none\n\n", "there is no key")):
        if content is not None:
            file.write_text(content)
        with pytest.raises(SystemExit):
            parse_args(["--api-key-file", str(file)])
        assert f"--api-key-file: {words}" in capsys.readouterr().err


@virtual
async def test_names_of_the_server(model_folder: Path) -> None:
    with serving(model_folder, allowed_hosts="llm.example.org, *.inner.example, LOCALHOST") as api:
        for host in ("llm.example.org", "LLM.example.org:8000", "a.inner.example", "localhost:1"):
            assert (await api.http.get("/v1/models", headers={"Host": host})).status_code == 200, host
        for host in (
            "evil.example", "llm.example.org.evil.example", "inner.example", "xinner.example", "127.0.0.1:8000", "localhost@evil.example",
        ):  # fmt: skip
            for path in ("/v1/models", "/", "/metrics", "/nowhere"):
                response = await api.http.get(path, headers={"Host": host})
                assert (response.status_code, response.json()["error"]["code"]) == (421, "host_not_allowed"), host
        assert (await api.http.get("/health", headers={"Host": "10.0.0.1"})).status_code == 200


@virtual
async def test_the_metrics_port_serves_metrics_only(model_folder: Path) -> None:
    with serving(model_folder, api_key="own", metrics_port=0) as api:
        assert (await api.http.get("/metrics")).status_code == 401
        assert (await api.http.get("/metrics", headers={"x-api-key": "own"})).status_code == 404
        client = client_of(api.api.build_metrics())
        found = {path: (await client.get(path)).status_code for path in ("/metrics", "/v1/models", "/", "/server_info", "/health")}
        assert found == {"/metrics": 200, "/v1/models": 404, "/": 404, "/server_info": 404, "/health": 404}
        await asyncio.gather(client.aclose(), api.http.aclose())


def test_the_api_as_a_process(model_folder: Path) -> None:
    """Fails if a port has no guard or limits (Prometheus needs no key), or if a soft limit of open files stays."""
    stack = Stack(model_folder, api_key="own", metrics_port=0)
    try:
        assert stack.http.get("/v1/models").status_code == 401
        assert stack.http.get("/v1/models", headers={"x-api-key": "own"}).status_code == 200
        assert "engine_responses_total" in httpx.get(stack.metrics_url).text
        assert httpx.get(stack.metrics_url, headers={"X": "x" * 70_000}).status_code == 431
        for process in stack.processes.values():
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert soft == hard
    finally:
        stack.close()
