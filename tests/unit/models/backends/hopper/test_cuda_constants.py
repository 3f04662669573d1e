"""What Python assumes of the CUDA sources, where no export says it."""

import re
from pathlib import Path

import pytest

from models.kernels import work_items
from models.kernels.hopper import compile
from models.kernels.stream import RowClass
from models.weights.float8 import BLOCK

pytest.importorskip("triton")  # beside the kernels
from models.kernels.hopper import attention, few_rows, flash_decoding, float8, int4_gemv

FOLDER = Path(compile.__file__).parent


def constant(name: str, source: str = "flash_decoding.cu") -> int:
    found = re.search(rf"\b{name} = (\d+)[,;]", (FOLDER / source).read_text())
    assert found is not None, name
    return int(found[1])


def test_work_items_of_split_attention() -> None:
    assert constant("kRows") == work_items.ROWS and constant("kBlocks") == flash_decoding.BLOCKS
    assert work_items.TILE % constant("kTile") == 0


def test_tokens_that_are_new_in_a_step() -> None:
    """Keys of earlier steps are read before the kernel ahead is done: a row's new ones must not be among them."""
    assert constant("kNewTokens") >= attention.MAX_SPLIT_TOKENS


def test_products_of_few_rows() -> None:
    assert constant("kMaxChosen", "float8_token.cuh") == float8.MAX_CHOSEN
    assert constant("kTokens", "few_rows.cu") == RowClass.FEW and constant("kRows", "few_rows.cu") == few_rows.ROWS
    assert constant("kChunk", "few_rows.cu") == few_rows.CHUNK == BLOCK


def test_matrices_that_the_int4_kernel_takes() -> None:
    assert constant("kRows", "int4_gemv.cu") == int4_gemv.ROWS and constant("kChunk", "int4_gemv.cu") == int4_gemv.COLUMNS


def test_all_sources_are_compiled_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(compile, "load_kernel", lambda name, head_dim: loaded.append((f"{name}.cu", head_dim)))
    compile.load_kernels(128, 72)
    text = [(f"{name}.cu", 128) for name in ("flash_decoding", "fused_decoding", "prefill_attention")]
    others = [*((f"{name}.cu", compile.NO_HEADS) for name in compile.PRODUCTS), ("varlen_attention.cu", 72)]
    assert sorted(loaded) == sorted([*text, *others])
    assert {name for name, _ in loaded} == {path.name for path in FOLDER.glob("*.cu")}
    loaded.clear()
    compile.load_kernels(64, 72)
    assert ("fused_decoding.cu", 64) not in loaded  # it is made for 128
