"""Settings of all tests: threads, Hypothesis profiles, and which tests run in one process.

With `pytest -n 2`, tests that share a server run in one process, so that the server starts once. The groups are listed in `GROUPS`.
"""

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.shared import close_shared

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the engine's processes choose their own
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
# Users of one of these fixtures run in one process, sorted by the fixtures. Those of `SHARED` are servers of `tests/shared.py`.
SHARED = {"demo": "demo", "chunked": "demo", "tiny_engine": "tiny", "tight": "tiny"}
GROUPS = {"stack_of": "stack", "running_processes": "processes", "llm": "demo", **SHARED}
# Groups and files that take longest come first.
FIRST = ("tests/test_static.py", "stack", "demo", "processes", "tiny", "tests/e2e/", "tests/unit/models/backends/portable/")
LAST_USES = pytest.StashKey[list[str]]()
GROUPS_FILE = pytest.StashKey[Path]()  # in which a worker of pytest-xdist tells the controller, which does not collect, each test's group

SPEED = [HealthCheck.too_slow]  # a verdict on the machine
settings.register_profile("gate", deadline=None, derandomize=True, max_examples=50, suppress_health_check=SPEED)
settings.register_profile("nightly", deadline=None, max_examples=1000, suppress_health_check=SPEED)  # --hypothesis-profile=nightly
settings.load_profile("gate")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if not HAS_GPU and "gpu" in collection_path.parts else None


def fixtures_of(item: pytest.Item) -> list[str]:
    return [name for name in GROUPS if name in getattr(item, "fixturenames", ())]


def group_of(item: pytest.Item) -> str:
    names = fixtures_of(item)
    return GROUPS[names[0]] if names else shared_by(item.nodeid)


def shared_by(nodeid: str) -> str:
    """What a test's file shares with other files: the GPU, the fixed ports of Ray's HAProxy, the clients' engine, or nothing."""
    path = PurePosixPath(nodeid.partition("::")[0])
    if "clients" in path.parts and "schemathesis" not in path.name:
        return "clients"
    return "gpu" if "gpu" in path.parts else "replicas" if "replicas" in path.name else str(path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests by group and by the servers that they share, and write down the groups if this is the first worker."""
    groups = {item: group_of(item) for item in items}
    order = {group: i for i, group in enumerate(dict.fromkeys(groups.values()))}
    first = {group: next((i for i, name in enumerate(FIRST) if group.startswith(name)), len(FIRST)) for group in order}
    servers = {item: [list(GROUPS).index(name) for name in fixtures_of(item)] for item in items}
    items.sort(key=lambda item: (first[groups[item]], order[groups[item]], servers[item]))
    last_users = {name: item for item in items for name in fixtures_of(item) if name in SHARED}
    for item in items:
        item.stash[LAST_USES] = [name for name, user in last_users.items() if user is item]
    worker = getattr(config, "workerinput", {})
    if worker.get("workerid") == "gw0":
        Path(worker["groups_file"]).write_text(json.dumps({item.nodeid: group for item, group in groups.items()}))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    if item.stash[LAST_USES]:
        close_shared(*item.stash[LAST_USES])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Close shared servers if the run was interrupted."""
    close_shared()
    if GROUPS_FILE in session.config.stash:
        session.config.stash[GROUPS_FILE].unlink()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give each worker of pytest-xdist the name of the file of groups."""
    stash = node.config.stash
    if GROUPS_FILE not in stash:
        stash[GROUPS_FILE] = Path(tempfile.mkstemp(prefix="test-groups-", suffix=".json")[1])
    node.workerinput["groups_file"] = str(stash[GROUPS_FILE])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        @functools.cached_property
        def _groups(self) -> dict[str, str]:
            groups = json.loads(config.stash[GROUPS_FILE].read_text())
            return groups

        def _split_scope(self, nodeid: str) -> str:
            return self._groups[nodeid]

    config.option.loadscopereorder = False  # groups of few tests are often long
    return Scheduling(config, log)
