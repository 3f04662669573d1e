"""Equal layers and moved addresses. Launches need a GPU (`tests/gpu/test_model_parity.py`)."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.kernels import captured
from models.kernels.captured import Unsupported, Words, moved
from models.kernels.stream import Residual, RowClass
from models.layers import repeats
from models.layers.repeats import Repeats, inventory, span_of
from models.scaffold import SHAPES, write_model_folder
from tests.unit.models import harness


@pytest.mark.parametrize(("shape", "kinds"), [("tiny", 1), ("tiny-moe", 1), ("3.5-tiny", 2)])
def test_layers_of_a_kind(tmp_path: Path, shape: str, kinds: int) -> None:
    write_model_folder(tmp_path, SHAPES[shape], weights="random", seed=0)
    model = harness.load(tmp_path)
    layers = model.language_model._layers
    values = [found for found, _ in map(inventory, layers)]
    assert len(set(values)) == kinds
    for layer in layers:
        own = {tensor.data_ptr() for tensor in layer.parameters() if tensor.numel()}
        assert own <= {tensor.data_ptr() for tensor in inventory(layer)[1]}
    layers[1].input_layernorm.eps *= 2  # type: ignore[operator, union-attr]
    assert len({found for found, _ in map(inventory, layers)}) == kinds + 1


def test_addresses_are_moved_with_the_outer_range() -> None:
    words = np.array([5, 1000, 1099, 1100, 1010, 7000, 6999, 1000], np.uint64)
    starts, ends = np.array([7000, 1010, 1000], np.uint64), np.array([7001, 1020, 1100], np.uint64)
    found = moved(words, np.arange(7), starts, ends, np.array([[0, 0, 0], [2**64 - 100, 50, 50]], np.uint64))
    assert found.tolist() == [words.tolist(), [5, 1050, 1149, 1100, 1060, 6900, 6999, 1000]]
    assert span_of(torch.zeros(10, 8)[:3, :2]) == 4 * 18 and span_of(torch.zeros(0)) == 0


class Layer(torch.nn.Module):
    """Adds its weight to the stream: reads and writes by address when it is repeated."""

    def __init__(self, value: float, width: int = 2) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((width,), value), requires_grad=False)


class Captured:
    """A launch: stream += weight of the first address. The second word is a number that looks like one."""

    def __init__(self, words: list[int]) -> None:
        self.words: Words = np.array(words, dtype=np.uint64)
        self.signature = len(words)

    def run(self, words: Words) -> None:
        TARGET[0] += ctypes.c_float.from_address(int(words[0])).value
        assert words[1] == NUMBER[0]


TARGET, NUMBER = [0.0], [0]


def run_model(
    layers: list[Layer],
    made: Repeats,
    monkeypatch: pytest.MonkeyPatch,
    fails: type[Exception] | None = None,
    moves: bool = False,
    has_parts: bool = True,
) -> list[int]:
    """Return the layers that ran in Python."""
    in_python: list[int] = []
    recording: list[list[int]] = []

    def capture(call: Callable[[], object]) -> Captured:
        recording.append([])
        call()
        found = recording.pop()
        if fails:
            raise fails("a test")
        return Captured(found)

    monkeypatch.setattr(repeats, "capture", capture)
    monkeypatch.setattr(repeats, "can_capture", lambda: True)
    residual = Residual(torch.zeros(1, 2))
    run = made.start(residual, lambda i: [])
    for i, layer in enumerate(layers):

        def call(i: int = i, layer: Layer = layer) -> None:
            in_python.append(i)
            residual.settle()
            if has_parts:
                residual.add_(torch.zeros(1, 1, 2) if moves else residual.room(1, 1, 2))
            words = [layer.weight.data_ptr(), NUMBER[0]]
            recording[-1].extend(words) if recording else Captured(words).run(np.array(words))

        run(i, residual, call)
    return in_python


def test_one_layer_of_a_kind_runs_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer(2.0**i, 3 if i == 4 else 2) for i in range(8)]
    made = Repeats(layers)
    TARGET[0], NUMBER[0] = 0.0, layers[0].weight.data_ptr()
    assert run_model(layers, made, monkeypatch) == list(range(8)), "the first step creates what is created once"
    assert TARGET == [255.0]
    assert run_model(layers, made, monkeypatch, has_parts=False) == [0, 1, 4], "two show the addresses"
    assert run_model(layers, made, monkeypatch, has_parts=False) == [0, 4]
    assert TARGET == [3 * 255.0]
    assert run_model(layers, made, monkeypatch) == [0, 1, 4]
    assert run_model(layers, made, monkeypatch, moves=True) == list(range(8)), "another address each time"
    for_each = [0, *(i for i in range(1, 8) for _ in range(1 + (i not in (4, 6, 7))))]
    assert run_model(layers, made, monkeypatch, fails=torch.OutOfMemoryError) == for_each, "the next layer may have memory"
    assert run_model(layers, made, monkeypatch, fails=Unsupported) == [0, 1, *range(1, 8)], "what was captured in vain runs"
    assert run_model(layers, made, monkeypatch) == list(range(8))
    assert TARGET == [8 * 255.0]


def test_a_layer_that_finds_empty_parts_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model_folder(tmp_path, SHAPES["tiny-moe"], weights="random", seed=0)
    model, found = harness.load(tmp_path), []

    def logits() -> torch.Tensor:
        runner = harness.PagedRunner(model)
        session = runner.start(harness.Prompt([3 * i % 97 for i in range(9)], [], []))
        return runner.step([(session, len(session.ids))], 1)

    def capture(call: Callable[[], object]) -> None:
        found.append(call.args[0].parts_STD)  # type: ignore[attr-defined]
        raise Unsupported("a test")

    expected = logits()
    monkeypatch.setattr(repeats, "capture", capture)
    monkeypatch.setattr(repeats, "can_capture", lambda: True)
    model.language_model._repeats._left[RowClass.of(9)] = 3, torch.float32
    assert logits().equal(expected) and found[0].shape == (3, 9, model.config.text.hidden_size)


def test_a_failed_compilation_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(captured, "CACHE", tmp_path)
    monkeypatch.setattr(captured, "SOURCE", tmp_path / "broken.c")
    (tmp_path / "broken.c").write_text("#error broken")
    monkeypatch.setattr(captured.ctypes, "CDLL", lambda *_: None)
    captured.library.cache_clear()
    assert captured.library() is None and captured.library() is None
    assert len(caplog.records) == 1 and "broken" in caplog.text
    captured.library.cache_clear()


def test_the_source_compiles_where_triton_does(tmp_path: Path) -> None:
    found: Any = captured.built(tmp_path)
    assert found.exists() and captured.built(tmp_path) == found and len(list(tmp_path.iterdir())) == 1
