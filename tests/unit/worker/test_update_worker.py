"""A worker's jobs: what it refuses has written nothing and leaves nothing open; names are those of the sender's checkpoints."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.torch import load_file

from engine.llm.client import write_tensors
from engine.wire.ipc import Inbox
from engine.wire.messages import ToScheduler
from engine.wire.updates import FromFolder, FromGroup, Order, OrderResult
from engine.worker import updates
from engine.worker.updates import UpdateWorker
from models.decoders.qwen3_vl import Qwen3VL
from models.scaffold import SHAPES, write_model_folder
from tests.unit.models import text_checkpoints
from tests.unit.models.harness import assert_same, load, stored_tensors
from tests.unit.models.test_updates import FILE, alter


class Rank:
    """A worker's update part with the scheduler's inbox."""

    def __init__(self, model: Qwen3VL, run_dir: Path) -> None:
        self.inbox: Inbox[ToScheduler] = Inbox(str(run_dir), "scheduler", ToScheduler)
        self.num_forgotten = 0
        self.last = OrderResult()
        self.worker = UpdateWorker(cast(Any, SimpleNamespace(run_dir=str(run_dir))), 0, model, self.forget)

    def forget(self) -> None:
        self.num_forgotten += 1

    def give(self, task: Any) -> str | None:
        """Return the problem of an order, if any."""
        self.worker.execute(Order(task))
        result = self.inbox.recv(60)
        assert isinstance(result, OrderResult)
        self.last = result
        return result.problem


@pytest.fixture
def rank(tiny_folder: Path, tmp_path: Path) -> Iterator[Rank]:
    one = Rank(load(tiny_folder), tmp_path)
    yield one
    one.inbox.close()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model_folder(folder, SHAPES["tiny"], weights="random", seed=1)
    return folder


def test_folders(rank: Rank, tiny_folder: Path, tmp_path: Path) -> None:
    folder = alter(tiny_folder, tmp_path / "altered")
    assert rank.give(FromFolder(str(folder))) is None and rank.num_forgotten == 1
    assert_same(rank.worker._model, load(folder))
    tensors = load_file(tiny_folder / FILE)
    (tmp_path / "tensors").mkdir()
    views = {name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in tensors.items()}
    write_tensors(views, str(tmp_path / "tensors" / FILE))
    assert rank.give(FromFolder(str(tmp_path / "tensors"))) is None
    assert_same(rank.worker._model, load(tiny_folder))


def test_tensors_of_a_group(rank: Rank, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them replace the model, some a part of it."""
    tensors = load_file(alter(tiny_folder, tmp_path / "altered") / FILE)
    rank.worker._group = cast(Any, object())
    for names in (list(tensors)[:1], list(tensors)):
        values = iter([tensors[name] for name in names])
        monkeypatch.setattr(updates, "broadcast", lambda group, tensor, values=values: tensor.copy_(next(values)))
        dtypes, shapes = [str(tensors[name].dtype) for name in names], [list(tensors[name].shape) for name in names]
        assert rank.give(FromGroup(names, dtypes, shapes)) is None
    assert_same(rank.worker._model, load(tmp_path / "altered"))


def test_refused_jobs(rank: Rank, tiny_folder: Path, tmp_path: Path) -> None:
    write_model_folder(tmp_path / "narrow", replace(SHAPES["tiny"], intermediate=384), weights="random", seed=1)
    write_model_folder(tmp_path / "tied", replace(SHAPES["tiny"], tied=True), weights="random", seed=1)
    write_model_folder(tmp_path / "float8", SHAPES["tiny"], weights="random", seed=1, format="float8")
    write_model_folder(tmp_path / "empty", SHAPES["tiny"], weights="none", seed=1)
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / f"{FILE}.index.json")
    os.mkfifo(tmp_path / "piped" / FILE)
    name = "model.language_model.norm.weight"
    cases = {
        "the model requires": [FromFolder(str(tmp_path / folder)) for folder in ("narrow", "float8")],
        "misses": [FromFolder(str(tmp_path / "tied"))],
        "contains no safetensors weights": [FromFolder(str(tmp_path / folder)) for folder in ("empty", "none", "piped", "\0")],
        "dtype float64 is not": [FromGroup([name], ["float64"], [[128]])],
        "has shape (8,), the model requires (128,)": [FromGroup([name], ["float32"], [[8]])],
    }
    before = {path: tensor.clone() for path, tensor in stored_tensors(cast(Any, rank.worker._model)).items()}
    assert "there is no group" in str(rank.give(FromGroup([name], ["float32"], [[128]])))
    rank.worker._group = cast(Any, object())
    for words, tasks in cases.items():
        for task in tasks:
            problem = rank.give(task)
            assert problem is not None and words in problem and str(tmp_path) not in problem, (task, problem)
    after = stored_tensors(cast(Any, rank.worker._model))
    assert not [path for path in before if not before[path].equal(after[path])] and rank.num_forgotten == 0


def test_a_text_model_is_updated_by_the_names_of_its_trainer(tmp_path: Path) -> None:
    text_checkpoints.write(folder := tmp_path / "llama", "llama")
    theirs = alter(folder, tmp_path / "altered")
    assert {name.split(".")[1] for name in load_file(theirs / FILE)} == {"layers", "embed_tokens", "norm", "weight"}
    rank = Rank(load(folder), tmp_path)
    assert rank.give(FromFolder(str(theirs))) is None
    assert_same(cast(Any, rank.worker._model), load(theirs))
    rank.inbox.close()
