"""What holds for all tests: one thread of arithmetic each, and no deadline by the clock, so that a busy machine changes no result."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the engine's own processes choose theirs
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("project", deadline=None)
settings.load_profile("project")
settings.register_profile("long", deadline=None, max_examples=20_000)  # `--hypothesis-profile=long`: minutes for tests that take seconds


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Over several processes (`-n 3 --dist loadgroup`) the tests of a file stay together, and so do all that want a GPU for themselves,
    and those of replicas: Ray's HAProxy has fixed ports."""
    if config.pluginmanager.hasplugin("xdist"):
        on_gpu = Path(__file__).with_name("gpu")
        for item in items:
            shared = "gpu" if on_gpu in item.path.parents else "replicas" if "replicas" in item.path.name else str(item.path)
            item.add_marker(pytest.mark.xdist_group(shared))
