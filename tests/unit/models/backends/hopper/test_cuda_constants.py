"""What Python assumes of the CUDA sources, where no export says it.

Red if one side is changed alone, or if a source is not compiled with the others at the start.
"""

import re
from pathlib import Path

import pytest

from models.kernels import work_items
from models.kernels.hopper import compile

pytest.importorskip("triton")  # beside the kernels
from models.kernels import humming
from models.kernels.heads import Heads
from models.kernels.hopper import attention, backend, flash_decoding, float8_gemv
from models.kernels.triton import backend as portable

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


def test_tokens_that_the_float8_kernel_takes() -> None:
    """What is more goes to other kernels: Python asks before it calls."""
    assert constant("kMaxChosen", "float8_token.cuh") == float8_gemv.MAX_CHOSEN


def test_matrices_that_the_int4_kernel_takes() -> None:
    assert constant("kRows", "int4_gemv.cu") == humming.ROWS and constant("kChunk", "int4_gemv.cu") == humming.COLUMNS


# values of the result and of the token, factors, bytes of a weight of the norm: 8B, 27B, 32B
@pytest.mark.parametrize(
    ("rows", "width", "factors", "norm"), [(4096, 12_288, 1, 0), (17_408, 5120, 2, 4), (5120, 25_600, 1, 0), (25_600, 5120, 2, 2)]
)
@pytest.mark.parametrize("multiprocessors", [114, 132])
def test_memory_that_the_float8_kernel_takes(rows: int, width: int, factors: int, norm: int, multiprocessors: int) -> None:
    warps, stages, tile, chunk = (constant(name, "float8_token.cuh") for name in ("kWarps", "kStages", "kRows", "kChunk"))
    tiles = -(-rows * factors // tile // multiprocessors)
    blocks = (tiles * tile // factors + 126) // 128 + 1
    needed = warps * stages * tile * (chunk + 64) + width * (2 + norm) + width // 128 * 4 * (1 + factors * blocks)
    assert needed + tiles * tile * (warps + 1) * 4 <= 227 << 10


def test_all_sources_are_compiled_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(compile, "load_kernel", lambda name, head_dim: loaded.append((f"{name}.cu", head_dim)))
    compile.load_kernels(128, 72)
    text = [(f"{name}.cu", 128) for name in ("flash_decoding", "fused_decoding", "prefill_attention")]
    others = [("float8_gemv.cu", compile.NO_HEADS), ("int4_gemv.cu", compile.NO_HEADS), ("varlen_attention.cu", 72)]
    assert sorted(loaded) == sorted([*text, *others])
    assert {name for name, _ in loaded} == {path.name for path in FOLDER.glob("*.cu")}
    loaded.clear()
    compile.load_kernels(64, 72)
    assert ("fused_decoding.cu", 64) not in loaded  # it is made for 128


def test_the_kernels_are_compared_with_torch_after_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(backend, "load_kernels", lambda *heads: done.append(heads))
    monkeypatch.setattr(portable, "check_kernels", lambda made, *heads: done.append((type(made), *heads)))
    backend.HopperBackend.__new__(backend.HopperBackend).load(Heads(32, 8, 128, 128), 72)
    assert done == [(128, 72), (backend.HopperBackend, 128, 72)]


def test_every_tensor_of_a_kernel_is_checked() -> None:
    """Types and contiguity are checked in one place, which alone reads a tensor's address."""
    sources = {path.name: path.read_text() for path in FOLDER.glob("*.cu*")}
    assert [name for name, text in sources.items() if "data_ptr()" in text] == ["hopper_launch.cuh"]
    assert sources["hopper_launch.cuh"].count("data_ptr()") == 1
