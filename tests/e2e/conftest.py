"""Model folders for the end-to-end tests, written once a session."""

from pathlib import Path

import pytest

from models.scaffold import SHAPES, write_model_folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model folder with random weights: the words mean nothing, the tokens are exact."""
    folder = tmp_path_factory.mktemp("tiny-model")
    write_model_folder(folder, SHAPES["tiny"], weights="random", seed=0)
    return folder
