"""Model folders and the running stack that the tests of the server share."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from models.scaffold import SHAPES, write_model_folder
from models.scaffold.chat_template import CHAT_TEMPLATE
from server.checkpoint import Checkpoint, read_checkpoint
from server.processor.detokenize import TokenTable
from tests.unit.server.loading import Loading
from tests.unit.server.stack import Stack, answer_text


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder, SHAPES["tiny"], weights="none", seed=0)
    return folder


@pytest.fixture(scope="session")
def thinking_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose generation prompt opens the thoughts, as that of Qwen3-VL's Thinking ones does."""
    folder = tmp_path_factory.mktemp("thinking")
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "{{- '<think>\\n' if add_generation_prompt -}}\n")
    return folder


@pytest.fixture(scope="session")
def checkpoint(model_folder: Path) -> Checkpoint:
    return read_checkpoint(model_folder)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint.tokenizer_file))


@pytest.fixture(scope="session")
def table(tokenizer: Tokenizer) -> TokenTable:
    return TokenTable(tokenizer)


@pytest.fixture(scope="session")
def running_stack(model_folder: Path) -> Iterator[Stack]:
    running = Stack(model_folder)
    yield running
    running.close()


@pytest.fixture
def stack(running_stack: Stack) -> Iterator[Stack]:
    """Starts with an echoing scheduler. Afterwards a good request is answered and both arenas are empty."""
    running_stack.scheduler.script = answer_text
    running_stack.scheduler.aborted.clear()
    yield running_stack
    running_stack.recover()


@pytest.fixture
async def loading(checkpoint: Checkpoint) -> AsyncIterator[Loading]:
    made = Loading(checkpoint)
    yield made
    await made.close()
