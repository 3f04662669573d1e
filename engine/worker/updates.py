"""Worker's part of weight updates: a job is prepared without writing anything, then executed or dropped as the scheduler says.

A failure while weights are written ends the engine: they would be a mixture of old and new.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper
from torch.distributed.rendezvous import rendezvous

from engine.wire.child import Child
from engine.wire.ipc import Outbox
from engine.wire.updates import FromFolder, FromGroup, Job, JobState, JoinGroup, LeaveGroup, Progress, TensorSpec, Verdict
from engine.worker.failure import explain
from models.checkpoint.load import opened
from models.checkpoint.names import Stored
from models.checkpoint.update import DTYPES, InMemory, WeightUpdate
from models.config.huggingface import read_config
from models.decoders.contract import LanguageModel

FAILURES = (ValueError, OSError, RuntimeError, MemoryError, SafetensorError)
TIMEOUT = timedelta(seconds=300)
PROGRESS_S = 1.0

Run = Callable[[], None]


class UpdateWorker:
    """Jobs of one rank. `forget` drops results computed from the old weights before a plan asked for them."""

    def __init__(self, child: Child, rank: int, model: LanguageModel, forget: Run) -> None:
        self._child, self._rank, self._model, self._forget = child, rank, model, forget
        self._scheduler: Outbox[JobState | Progress] = Outbox(child.run_dir, "scheduler")
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._resources = ExitStack()  # resources of the prepared job
        self._execute, self._is_whole, self._reported = _nothing, False, 0.0

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {Job: self.prepare, Verdict: self.conclude}

    @torch.inference_mode()
    def prepare(self, job: Job) -> None:
        problem = None
        try:
            self._execute = self._prepared(job.task)
        except FAILURES as failure:
            self._drop()
            problem = explain(failure)
        self._scheduler.send(JobState(problem))

    @torch.inference_mode()
    def conclude(self, verdict: Verdict) -> None:
        if verdict.is_granted:
            try:
                self._synchronize()
                self._execute()
                self._synchronize()
            except FAILURES as failure:
                self._child.failed(f"some weights were already replaced, so the engine exits: {explain(failure)}")
                os._exit(1)
            self._forget()
            self._scheduler.send(JobState(is_whole=self._is_whole))
        self._drop()

    def _prepared(self, task: FromFolder | FromGroup | JoinGroup | LeaveGroup) -> Run:
        """Check the task and return a function that executes it."""
        match task:
            case FromFolder():
                return self._from_folder(Path(task.path))
            case FromGroup():
                return self._from_group(self._group(task.group), task.tensors)
            case JoinGroup():
                return self._join(task)
            case LeaveGroup():
                group = self._group(task.group)

                def leave() -> None:
                    del self._groups[task.group]
                    dist.destroy_process_group(group)

                return leave

    def _from_folder(self, folder: Path) -> Run:
        """A folder without config.json has weights of this model."""
        model = self._model.config
        try:
            found = read_config(folder, model.text.has_head) if (folder / "config.json").exists() else model
            tensors = self._resources.enter_context(opened(folder, model.architecture))
        except (ValueError, OSError) as problem:  # it contains the path, which clients must not see
            reason = str(problem).replace(str(folder), "it") if isinstance(problem, ValueError) else type(problem).__name__
            raise ValueError(f"the folder cannot be read: {reason}") from None
        theirs = replace(found.text, quantized_to=model.text.quantized_to), found.vision, found.tie_word_embeddings
        if found.architecture != model.architecture or theirs != (model.text, model.vision, model.tie_word_embeddings):
            raise ValueError("the folder contains a different model: the architecture, sizes or format in its config.json differ")
        update = self._checked(tensors, is_whole=True)

        def write() -> None:
            for name in update.names:
                update.write(name, tensors[name])
                self._report_progress()
            update.finish()

        return write

    def _from_group(self, group: dist.ProcessGroup, specs: tuple[TensorSpec, ...]) -> Run:
        """Receive each tensor into one buffer, which is allocated before anything is written."""
        announced = {spec.name: torch.empty(spec.shape, dtype=dtype_of(spec), device="meta") for spec in specs}
        names = self._model.config.architecture.names_of(announced)  # the model's to the sender's
        update = self._checked({known: InMemory(announced[name]) for known, name in names.items()}, is_whole=False)
        size = max((each.nbytes for each in announced.values()), default=0)
        buffer = torch.empty(size, dtype=torch.uint8, device=self._model.device)
        known_of = {name: known for known, name in names.items()}

        def receive() -> None:
            for spec in specs:
                meta = announced[spec.name]
                tensor = buffer[: meta.nbytes].view(meta.dtype).view(meta.shape)
                broadcast(group, tensor)
                if spec.name in known_of:
                    update.write(known_of[spec.name], InMemory(tensor))
                self._report_progress()
            update.finish()

        return receive

    def _join(self, task: JoinGroup) -> Run:
        if task.group in self._groups:
            raise ValueError(f"group {task.group} already exists")
        try:
            group = join(task.group, task.backend, task.address, task.port, task.first_rank + self._rank, task.size)
        except dist.DistError as problem:
            raise ValueError(f"the group could not be joined: is its rank 0 running? {str(problem).partition(chr(10))[0]}") from None
        self._resources.callback(dist.destroy_process_group, group)

        def keep() -> None:
            self._groups[task.group] = group
            self._resources.pop_all()

        return keep

    def _checked(self, tensors: Mapping[str, Stored], is_whole: bool) -> WeightUpdate:
        """Return the update. ValueError or OutOfMemoryError if it cannot be written."""
        update = WeightUpdate(self._model, tensors, is_whole)
        self._is_whole = update.is_whole
        self._synchronize()
        torch.empty(update.extra_bytes, dtype=torch.uint8, device=self._model.device)
        return update

    def _group(self, name: str) -> dist.ProcessGroup:
        if name not in self._groups:
            raise ValueError(f"group {name} does not exist: create it with /init_weights_update_group")
        return self._groups[name]

    def _report_progress(self) -> None:
        if (now := time.monotonic()) - self._reported > PROGRESS_S:
            self._reported = now
            self._scheduler.send(Progress())

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _drop(self) -> None:
        self._resources.close()
        self._execute, self._is_whole = _nothing, False


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the dtype. ValueError for one that no checkpoint has."""
    if (dtype := DTYPES.get(spec.dtype.removeprefix("torch."))) is None:
        raise ValueError(f"tensor {spec.name}: dtype {spec.dtype[:40]} is not one of {', '.join(DTYPES)}")
    return dtype


def join(name: str, backend: str, address: str, port: int, rank: int, size: int) -> dist.ProcessGroup:
    """Return a group of a trainer (rank 0, which listens at the address) and workers when all have joined. It is created like SGLang's
    `init_custom_process_group`, so that trainers with support for SGLang can join it. RuntimeError or ValueError after the timeout."""
    host = f"[{address}]" if ":" in address else address
    store, _, _ = next(rendezvous(f"tcp://{host}:{port}", rank, size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    group, _ = _new_process_group_helper(size, rank, [], backend, dist.PrefixStore(name, store), GroupName(name), timeout=TIMEOUT)
    dist.distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}  # for the functions of torch.distributed
    return group


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Broadcast rank 0's tensor to all ranks, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor], options).wait()


def _nothing() -> None: ...
