"""Model folders and running stacks that the tests of the server share."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer

from models.scaffold import SHAPES, write_model_folder
from models.scaffold.tokenizer import chat_template
from server.checkpoint import Checkpoint, read_checkpoint
from server.processor.text.output_text import TokenTable
from tests.unit.server.loading import Loading
from tests.unit.server.stack import Stack, StackOf


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
    (folder / "chat_template.jinja").write_text(chat_template() + "{{- '<think>\\n' if add_generation_prompt -}}\n")
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
def stack_of() -> Iterator[StackOf]:
    """Return the session's stack of a model folder and these settings, in this process. It starts with the first call."""
    made: dict[str, Stack] = {}

    def get(folder: Path, **settings: object) -> Stack:
        key = repr((folder, sorted(settings.items())))
        if key not in made:
            made[key] = Stack(folder, in_process=True, **settings)
        made[key].reset()
        return made[key]

    yield get
    for stack in made.values():
        stack.close()


@pytest.fixture(scope="session")
def running_stack(stack_of: StackOf, model_folder: Path) -> Stack:
    return stack_of(model_folder)


@pytest.fixture
def stack(running_stack: Stack) -> Iterator[Stack]:
    """Return the stack with the default settings. Afterwards a good request is answered and both arenas are empty."""
    running_stack.reset()
    yield running_stack
    running_stack.recover()


@pytest.fixture(scope="session")
def client(running_stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running_stack.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
async def loading(checkpoint: Checkpoint) -> AsyncIterator[Loading]:
    made = Loading(checkpoint)
    yield made
    await made.close()
