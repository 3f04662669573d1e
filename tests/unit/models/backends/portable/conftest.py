"""Three processes with Triton's interpreter for all files that are run: to start one takes seconds."""

from pathlib import Path

import pytest

FILES = pytest.StashKey[list[str]]()
GROUPS = (("test_delta.py",), ("test_moe.py", "test_paged_attention.py"))  # the others are one


@pytest.fixture
def interpreted_files(request: pytest.FixtureRequest) -> list[str]:
    """The files whose interpreted tests this test has to run."""
    return request.node.stash[FILES]


@pytest.hookimpl(trylast=True)  # of what `-k` and the like have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The first of a group's tests that would start a process runs the files of the group; the others are skipped and say where theirs run.

    `--last-failed` does not say in which of the files a test failed: then all are run.
    """
    starters = [item for item in items if "interpreted_files" in getattr(item, "fixturenames", ())]
    paths = [item.path for item in starters]
    if config.getoption("lf", False):
        paths = [path for path in sorted(Path(__file__).parent.glob("test_*.py")) if "interpreted_files" in path.read_text()]
    for names in (*GROUPS, {path.name for path in paths}.difference(*GROUPS)):
        group = [starter for starter in starters if starter.path.name in names]
        for starter in group:
            starter.stash[FILES] = [str(path) for path in paths if path.name in names]
        for starter in group[1:]:
            starter.add_marker(pytest.mark.skip(reason=f"the interpreted tests of this file run in one of {group[0].path.name}"))
