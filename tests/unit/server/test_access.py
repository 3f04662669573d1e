"""Who gets in: keys, names of the server, and metrics apart."""

from pathlib import Path

import httpx
import pytest

from engine.flags import parse_args
from tests.unit.server.stack import Stack


def test_each_of_several_keys_opens_and_nothing_else_does(model_folder: Path, tmp_path: Path) -> None:
    """Red if one of the keys is not compared, or a comment, a beginning or both keys together open the server, or if the page needs one."""
    file = tmp_path / "keys"
    file.write_text("# of clients\nfirst\n\n  sécond  \n")
    stack = Stack(model_folder, api_key="own", api_key_file=str(file))
    try:
        for key in ("own", "first", "sécond"):
            for headers in ({"Authorization": f"bearer {key}".encode()}, {"x-api-key": key.encode()}):
                assert stack.http.get("/v1/models", headers=headers).status_code == 200
        for wrong in ("", "# of clients", "of clients", "firs", "own first", "own\nfirst", "None"):
            response = stack.http.get("/v1/models", headers={"x-api-key": wrong.encode().replace(b"\n", b",")})
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        page = stack.http.get("/")  # which asks for the key itself
        assert page.status_code == 200 and "wants an API key" in page.text and 'id="key"' in page.text
        assert "first" not in stack.http.get("/server_info", headers={"x-api-key": "own"}).text
    finally:
        stack.close()


@pytest.mark.parametrize(("content", "words"), [(None, "there is no file"), ("# none\n\n", "there is no key")])
def test_a_file_without_a_key_starts_nothing(tmp_path: Path, content: str | None, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a server that is meant to be closed is open because its secret was not there."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit):
        parse_args(["--api-key-file", str(file)])
    assert f"--api-key-file: {words}" in capsys.readouterr().err


def test_names_of_the_server(model_folder: Path) -> None:
    """Red if a page whose name was made to lead here may call, or if probes, which use an address, may not."""
    stack = Stack(model_folder, allowed_hosts="llm.example.org, *.inner.example, LOCALHOST")
    try:
        for host in ("llm.example.org", "LLM.example.org:8000", "a.inner.example", "localhost:1"):
            assert stack.http.get("/v1/models", headers={"Host": host}).status_code == 200, host
        for host in (
            "evil.example", "llm.example.org.evil.example", "inner.example", "xinner.example", "127.0.0.1:8000", "localhost@evil.example",
        ):  # fmt: skip
            for path in ("/v1/models", "/", "/metrics", "/nowhere"):
                response = stack.http.get(path, headers={"Host": host})
                assert (response.status_code, response.json()["error"]["code"]) == (421, "host_not_allowed"), host
        assert stack.http.get("/health", headers={"Host": "10.0.0.1"}).status_code == 200
    finally:
        stack.close()


def test_metrics_on_a_port_of_their_own(model_folder: Path) -> None:
    """Red if Prometheus needs the key of clients, if clients see metrics, or if the other port shows more than them."""
    stack = Stack(model_folder, api_key="own", metrics_port=0)
    try:
        stack.chat("hello")
        assert "engine_responses_total" in httpx.get(stack.metrics_url).text
        assert stack.http.get("/metrics").status_code == 401
        assert stack.http.get("/metrics", headers={"x-api-key": "own"}).status_code == 404
        for path in ("/v1/models", "/", "/server_info", "/health"):
            assert httpx.get(stack.metrics_url.replace("/metrics", path)).status_code == 404
    finally:
        stack.close()
