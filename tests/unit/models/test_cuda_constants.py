"""What Python assumes of the CUDA sources, where no export says it.

Red if one side is changed alone, or if a source is not compiled with the others at the start.
"""

import re
from pathlib import Path

import pytest

import models.layers
from models.layers import compile_cuda, split_plan

pytest.importorskip("triton")  # beside the kernels
from models.layers import attention_cuda, split_cuda

FOLDER = Path(models.layers.__file__).parent
SPLIT = (FOLDER / "split_attention.cu").read_text()


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


def test_all_sources_are_compiled_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(compile_cuda, "load_kernel", lambda name, head_dim: loaded.append((f"{name}.cu", head_dim)))
    compile_cuda.load_kernels(128, 72)
    assert sorted(loaded) == [("prefill_attention.cu", 128), ("segment_attention.cu", 72), ("split_attention.cu", 128)]
    assert {name for name, _ in loaded} == {path.name for path in FOLDER.glob("*.cu")}


def test_a_source_that_does_not_compile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, head_dim: int) -> None:
        if name == "split_attention":
            raise RuntimeError("nvcc")

    monkeypatch.setattr(compile_cuda, "load_kernel", fail)
    with pytest.raises(RuntimeError, match="nvcc"):
        compile_cuda.load_kernels(128, 72)
