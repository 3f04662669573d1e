"""What holds for all tests: one thread of arithmetic each, and no deadline by the clock, so that a busy machine changes no result."""

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the engine's own processes choose theirs
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

EXTENDED = re.compile(r"^pytestmark = .*pytest\.mark\.extended", re.MULTILINE)

settings.register_profile("project", deadline=None)
settings.load_profile("project")
settings.register_profile("long", deadline=None, max_examples=20_000)  # `--hypothesis-profile=long`: minutes for tests that take seconds


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of extended tests alone, where none of them runs: they import other clients for seconds."""
    is_file = collection_path.suffix == ".py" and config.option.markexpr.startswith("gate or not")
    return True if is_file and EXTENDED.search(collection_path.read_text()) else None


@pytest.fixture
def no_collections() -> Iterator[None]:
    """For tests that measure time: a full collection looks at what all tests of this process have left, and takes most of a second."""
    gc.disable()
    yield
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Over several processes (`-n 3`) tests run in the order in which they were found, and those that share something in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return shared_by(nodeid)

    config.option.loadscopereorder = False  # files of few tests are often the long ones: not last
    return Scheduling(config, log)


def shared_by(nodeid: str) -> str:
    """What a test shares with others: the servers of its file, the GPU, or the fixed ports of Ray's HAProxy."""
    path = PurePosixPath(nodeid.partition("::")[0])
    return "gpu" if "gpu" in path.parts else "replicas" if "replicas" in path.name else str(path)
