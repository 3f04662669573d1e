"""A worker's jobs: what it refuses has written nothing and leaves nothing open; names are those of the sender's checkpoints."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.torch import load_file

from engine.updates.memory import FOLDER, shared
from engine.updates.worker import UpdateWorker
from engine.wire.ipc import Inbox
from engine.wire.messages import ToScheduler
from engine.wire.updates import FromFolder, FromGroup, FromMemory, Job, JobState, LeaveGroup, Segment, TensorSpec, Verdict
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
        self.worker = UpdateWorker(cast(Any, SimpleNamespace(run_dir=str(run_dir))), 0, model, self.forget)

    def forget(self) -> None:
        self.num_forgotten += 1

    def give(self, task: Any, is_granted: bool = True) -> str | None:
        """Return the problem of a job, if any; otherwise it is executed or dropped."""
        self.worker.prepare(Job(1, task))
        if (problem := self.state().problem) is None:
            self.worker.conclude(Verdict(is_granted))
            assert not is_granted or self.state().problem is None
        return problem

    def state(self) -> JobState:
        state = self.inbox.recv(60)
        assert isinstance(state, JobState)
        return state


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


def test_a_job_is_executed_or_dropped(rank: Rank, tiny_folder: Path, tmp_path: Path) -> None:
    folder = alter(tiny_folder, tmp_path / "altered")
    assert rank.give(FromFolder(str(folder)), is_granted=False) is None
    assert_same(rank.worker._model, load(tiny_folder))
    assert rank.give(FromFolder(str(folder))) is None and rank.num_forgotten == 1
    assert_same(rank.worker._model, load(folder))
    with shared(load_file(tiny_folder / FILE)) as specs:
        assert rank.give(FromMemory(tuple(specs))) is None
        maps = Path("/proc/self/maps").read_text()
        assert specs[0].places["cpu"].name not in maps, "memory of the sender is still mapped"  # type: ignore[union-attr]
    assert_same(rank.worker._model, load(tiny_folder))


def test_refused_jobs(rank: Rank, tiny_folder: Path, tmp_path: Path) -> None:
    """Reasons name no path."""
    write_model_folder(tmp_path / "narrow", replace(SHAPES["tiny"], intermediate=384), weights="random", seed=1)
    write_model_folder(tmp_path / "tied", replace(SHAPES["tiny"], tied=True), weights="random", seed=1)
    write_model_folder(tmp_path / "float8", SHAPES["tiny"], weights="random", seed=1, format="float8")
    write_model_folder(tmp_path / "empty", SHAPES["tiny"], weights="none", seed=1)
    (file := FOLDER / f"test-{os.getpid()}").write_bytes(bytes(100))
    name = "model.language_model.norm.weight"
    good = TensorSpec(name, "float32", (128,))

    def placed(**changes: Any) -> FromMemory:
        return FromMemory((TensorSpec(**{"name": name, "dtype": "float32", "shape": (8,), **changes}),))

    cases = {
        "contains a different model": [FromFolder(str(tmp_path / folder)) for folder in ("narrow", "tied", "float8")],
        "the folder cannot be read": [FromFolder(str(tmp_path / "empty")), FromFolder(str(tmp_path / "none")), FromFolder("\0")],
        "has no memory that rank 0 can read: GPU-1": [placed(places={"GPU-1": Segment(file.name)})],
        "must be the name of a file": [placed(places={"cpu": Segment(path)}) for path in ("../etc/passwd", "/etc/passwd", "", "..", "a/b")],
        "cannot be opened": [placed(places={"cpu": Segment("there-is-none")})],
        "is not within its segment": [placed(places={"cpu": Segment(file.name, offset)}) for offset in (72, -1, 1 << 40)],
        "dtype float64 is not": [placed(dtype="float64", places={"cpu": Segment(file.name)})],
        "has shape (8,), the model requires (128,)": [placed(places={"cpu": Segment(file.name)})],
        "group g does not exist": [FromGroup("g", (good,)), LeaveGroup("g")],
    }
    before = {path: tensor.clone() for path, tensor in stored_tensors(cast(Any, rank.worker._model)).items()}
    try:
        for words, tasks in cases.items():
            for task in tasks:
                problem = rank.give(task)
                assert problem is not None and words in problem and str(tmp_path) not in problem, (task, problem)
    finally:
        file.unlink()
    after = stored_tensors(cast(Any, rank.worker._model))
    assert not [path for path in before if not before[path].equal(after[path])] and rank.num_forgotten == 0


def test_a_text_model_is_updated_by_the_names_of_its_trainer(tmp_path: Path) -> None:
    text_checkpoints.write(folder := tmp_path / "llama", "llama")
    theirs = alter(folder, tmp_path / "altered")
    rank = Rank(load(folder), tmp_path)
    with shared(load_file(theirs / FILE)) as specs:
        assert {spec.name.split(".")[1] for spec in specs} == {"layers", "embed_tokens", "norm", "weight"}
        assert rank.give(FromMemory(tuple(specs))) is None
    assert_same(cast(Any, rank.worker._model), load(theirs))
    rank.inbox.close()
