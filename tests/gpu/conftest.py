"""The backend that the tests of a GPU run with: `python -m pytest tests/gpu --backend portable`."""

import pytest
import torch

from models.kernels.backend import Backend
from models.kernels.make import make_backend


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", choices=("hopper", "portable"), default="hopper", help="of tests on a GPU")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    return make_backend(request.config.getoption("--backend"), torch.device("cuda", 0))
