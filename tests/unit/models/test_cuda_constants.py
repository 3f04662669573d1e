"""What Python assumes of the CUDA sources, where no export says it. Red if one side is changed alone."""

import re
from pathlib import Path

import pytest

import models.layers
from models.layers import split_plan

pytest.importorskip("triton")  # beside the kernels
from models.layers import attention_cuda, split_cuda

SPLIT = (Path(models.layers.__file__).parent / "split_attention.cu").read_text()


def constant(name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)[,;]", SPLIT)
    assert found is not None, name
    return int(found[1])


def test_units_of_split_attention() -> None:
    assert constant("kRows") == split_plan.ROWS and constant("kBlocks") == split_cuda.BLOCKS
    assert split_plan.TILE % constant("kTile") == 0


def test_tokens_that_are_new_in_a_step() -> None:
    """Keys of earlier steps are read before the kernel ahead is done: a row's new ones must not be among them."""
    assert constant("kNewTokens") >= attention_cuda.MAX_SPLIT_TOKENS
