"""One server of the demo model for the clients that people use; each has a file of its own here."""

from collections.abc import Iterator

import pytest

from tests.e2e.serving import Engine, serve


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with serve("demo") as running:
        yield running
