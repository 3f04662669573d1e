"""Model folders and the engines that tests share: each is started by its first test and closed after its last (`tests/conftest.py`)."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import Sequence, TemplateProcessing

from models.scaffold import SHAPES, write_model_folder
from tests.e2e.serving import Engine, serve
from tests.shared import shared

TIGHT = [
    *("--kv-cache-memory-bytes", str(40 * 131_072), "--image-cache-bytes", "400K"),  # 40 blocks
    *("--max-num-batched-tokens", "256", "--max-num-mixed-tokens", "128"),
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights. Its tokenizer ends a text as that of Qwen3-VL-Embedding does."""
    folder = tmp_path_factory.mktemp("tiny-model")
    write_model_folder(folder, SHAPES["tiny"], weights="random", seed=0)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    ending = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))])
    tokenizer.post_processor = Sequence([tokenizer.post_processor, ending])
    tokenizer.save(str(file))
    return folder


@pytest.fixture
def demo() -> Engine:
    """The demo model with default steps: every prompt of these tests fits into one."""
    return shared("demo", lambda: serve("demo"))


@pytest.fixture
def chunked() -> Engine:
    """The demo model in steps of 64 tokens on two ranks, with a log line per step."""
    steps = ("--max-num-batched-tokens", "64", "--max-num-mixed-tokens", "64", "--max-num-seqs", "16")
    return shared("chunked", lambda: serve("demo", *steps, "--tp", "2", "--log-level", "debug"))


@pytest.fixture
def tiny_engine(tiny: Path) -> Engine:
    """The tiny model in steps of 512 tokens, which hold every prompt of these tests."""
    steps = ("--max-num-batched-tokens", "512", "--max-num-encoder-tokens", "512", "--max-num-seqs", "16")
    return shared("tiny_engine", lambda: serve(tiny, "--max-model-len", "2048", *steps))


@pytest.fixture
def tight(tiny: Path) -> Engine:
    return shared("tight", lambda: serve(tiny, *TIGHT))
