"""One server of the demo model for the clients that people use; each has a file of its own here. `--engine-url` names one that runs."""

from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest

from tests.e2e.serving import serve


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine-url", default=None, help="of a server that runs; else one is started")
    parser.addoption("--newest-npm", action="store_true", help="take the latest versions of npm's packages")


@pytest.fixture
def is_newest(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--newest-npm", default=False))


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[object]:
    url = request.config.getoption("--engine-url", default=None)
    if url is not None:
        yield SimpleNamespace(url=url, client=httpx.Client(base_url=url, timeout=120))
        return
    with serve("demo") as running:
        yield running
