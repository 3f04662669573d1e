"""Worker's part of weight updates: a job is prepared without writing anything, then executed or dropped as the scheduler says.

A failure while weights are written ends the engine: they would be a mixture of old and new.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from engine.launch.child import Child
from engine.updates.group import broadcast, join
from engine.updates.memory import dtype_of, opened_tensor
from engine.wire.ipc import Outbox
from engine.wire.updates import FromFolder, FromGroup, FromMemory, Job, JobState, JoinGroup, LeaveGroup, Rename, TensorSpec, Verdict
from engine.worker.failure import explain
from models.checkpoint.load import opened
from models.checkpoint.names import Stored
from models.checkpoint.update import InMemory, WeightUpdate
from models.config.huggingface import read_config
from models.decoders.contract import LanguageModel

FAILURES = (ValueError, OSError, RuntimeError, MemoryError, SafetensorError)


class UpdateWorker:
    """Jobs of one rank. `forget` drops results computed from the old weights before a plan asked for them."""

    def __init__(self, child: Child, rank: int, model: LanguageModel, forget: Callable[[], None]) -> None:
        self._child, self._rank, self._model, self._forget = child, rank, model, forget
        self._scheduler: Outbox[JobState] = Outbox(child.run_dir, "scheduler")
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._resources = ExitStack()  # resources of the prepared job
        self._execute: Callable[[], None] = _nothing

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
            self._scheduler.send(JobState())
        self._drop()

    def _prepared(self, task: FromFolder | FromMemory | FromGroup | JoinGroup | LeaveGroup | Rename) -> Callable[[], None]:
        """Check the task and return a function that executes it."""
        match task:
            case FromFolder():
                return self._from_folder(Path(task.path))
            case FromMemory():
                return self._writing(self._known({spec.name: InMemory(opened_tensor(spec, self._model.device)) for spec in task.tensors}))
            case FromGroup():
                return self._from_group(self._group(task.group), task.tensors)
            case JoinGroup():
                return self._join(task)
            case Rename():
                return _nothing
            case LeaveGroup():
                group = self._group(task.group)

                def leave() -> None:
                    del self._groups[task.group]
                    dist.destroy_process_group(group)

                return leave

    def _from_folder(self, folder: Path) -> Callable[[], None]:
        model, architecture = self._model.config, self._model.config.architecture
        try:
            found = read_config(folder, model.text.has_head)
            tensors = self._resources.enter_context(opened(folder, architecture))
        except (ValueError, OSError) as problem:  # it contains the path, which clients must not see
            reason = str(problem).replace(str(folder), "it") if isinstance(problem, ValueError) else type(problem).__name__
            raise ValueError(f"the folder cannot be read: {reason}") from None
        theirs = replace(found.text, quantized_to=model.text.quantized_to), found.vision, found.tie_word_embeddings
        if found.architecture != architecture or theirs != (model.text, model.vision, model.tie_word_embeddings):
            raise ValueError("the folder contains a different model: the architecture, sizes or format in its config.json differ")
        return self._writing(tensors, is_whole=True)

    def _from_group(self, group: dist.ProcessGroup, specs: tuple[TensorSpec, ...]) -> Callable[[], None]:
        """Receive each tensor into one buffer, which is allocated before anything is written."""
        announced = {spec.name: InMemory(torch.empty(spec.shape, dtype=dtype_of(spec), device="meta")) for spec in specs}
        update = self._checked(self._known(announced))
        size = max((each.tensor.nbytes for each in announced.values()), default=0)
        buffer = torch.empty(size, dtype=torch.uint8, device=self._model.device)
        known_of = {name: known for known, name in self._names(announced).items()}

        def receive() -> None:
            for spec in specs:
                meta = announced[spec.name].tensor
                tensor = buffer[: meta.nbytes].view(meta.dtype).view(meta.shape)
                broadcast(group, tensor)
                if spec.name in known_of:
                    update.write(known_of[spec.name], InMemory(tensor))
            update.finish()

        return receive

    def _join(self, task: JoinGroup) -> Callable[[], None]:
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

    def _checked(self, tensors: Mapping[str, Stored], is_whole: bool = False) -> WeightUpdate:
        """Return the update. ValueError or OutOfMemoryError if it cannot be written."""
        update = WeightUpdate(self._model, tensors, is_whole)
        self._synchronize()
        torch.empty(update.extra_bytes, dtype=torch.uint8, device=self._model.device)
        return update

    def _names(self, tensors: Iterable[str]) -> dict[str, str]:
        """Map the model's names to the sender's."""
        return self._model.config.architecture.names_of(tensors)

    def _known(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        return {known: tensors[name] for known, name in self._names(tensors).items()}

    def _writing(self, tensors: Mapping[str, Stored], is_whole: bool = False) -> Callable[[], None]:
        """Check tensors and return a function that writes them."""
        update = self._checked(tensors, is_whole)

        def write() -> None:
            for name in update.names:
                update.write(name, tensors[name])
            update.finish()

        return write

    def _group(self, name: str) -> dist.ProcessGroup:
        if name not in self._groups:
            raise ValueError(f"group {name} does not exist: create it with /init_weights_update_group")
        return self._groups[name]

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _drop(self) -> None:
        self._resources.close()
        self._execute = _nothing


def _nothing() -> None: ...
