"""What the launcher says when it is ready."""

import pytest

from engine.config import EngineConfig
from engine.ipc import Runtime
from engine.serve import ready_text


@pytest.mark.parametrize("api_key", [None, "secret"])
def test_the_example_works_as_it_stands(api_key: str | None) -> None:
    """Red if the curl line of a server with a key would be answered by 401, or if the key is printed."""
    runtime = Runtime(EngineConfig(api_key=api_key), "", (0, 0), 0, "", "demo", 100)
    text = ready_text("http://127.0.0.1:8000", runtime, 1.0)
    assert ("-H 'Authorization: Bearer " in text) == (api_key is not None) and "secret" not in text
