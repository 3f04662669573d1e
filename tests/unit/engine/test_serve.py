"""What the launcher says when it is ready, and what it refuses to start."""

import pytest

from engine.arena import memory_limit
from engine.config import EngineConfig
from engine.ipc import Runtime
from engine.serve import make_runtime, ready_text
from engine.supervise import Family


@pytest.mark.parametrize("api_key", [None, "secret"])
def test_the_example_works_as_it_stands(api_key: str | None) -> None:
    """Red if the curl line of a server with a key would be answered by 401, or if the key is printed."""
    runtime = Runtime(EngineConfig(api_key=api_key), "", (0, 0), 0, "", "demo", 100)
    text = ready_text("http://127.0.0.1:8000", runtime, 1.0)
    assert ("-H 'Authorization: Bearer " in text) == (api_key is not None) and "secret" not in text


def test_more_host_memory_than_there_is_does_not_start() -> None:
    """Red if an engine takes memory until the machine has none: each rank takes its own."""
    family = Family()
    try:
        with pytest.raises(ValueError, match="--image-host-cache-bytes take"):
            make_runtime(EngineConfig(tp=4, image_host_cache_bytes=memory_limit() // 4), family)
    finally:
        family.stop()
