"""Worker's part of weight updates. An update is checked before anything is written; a failure while it is written ends the engine."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper
from torch.distributed.rendezvous import rendezvous

from engine.wire.child import Child
from engine.wire.ipc import Outbox
from engine.wire.updates import FromFolder, FromGroup, JoinGroup, Order, OrderResult
from engine.worker.failure import explain
from models.checkpoint.load import opened
from models.checkpoint.names import Stored
from models.checkpoint.update import DTYPES, InMemory, WeightUpdate
from models.decoders.contract import LanguageModel

FAILURES = (ValueError, OSError, RuntimeError, MemoryError, SafetensorError)
TIMEOUT = timedelta(seconds=300)


class UpdateWorker:
    """Orders of one rank. `forget` drops results computed from the old weights before a plan asked for them."""

    def __init__(self, child: Child, rank: int, model: LanguageModel, forget: Callable[[], None]) -> None:
        self._child, self._rank, self._model, self._forget = child, rank, model, forget
        self._scheduler: Outbox[OrderResult] = Outbox(child.run_dir, "scheduler")
        self._group: dist.ProcessGroup | None = None

    @torch.inference_mode()
    def execute(self, order: Order) -> None:
        problem = None
        try:
            match order.task:
                case FromFolder():
                    self._load(order.task.path)
                case FromGroup():
                    self._receive(order.task)
                case JoinGroup():
                    self._join(order.task)
        except FAILURES as failure:
            problem = explain(failure)
        self._scheduler.send(OrderResult(problem))

    def _load(self, folder: str) -> None:
        with ExitStack() as stack:
            try:
                tensors = stack.enter_context(opened(Path(folder), self._model.config.architecture))
            except (ValueError, OSError) as problem:
                raise ValueError(str(problem).replace(folder, "the folder")) from None
            update = WeightUpdate(self._model, tensors, is_whole=True)
            self._write(update, ((name, tensors[name]) for name in update.names))

    def _receive(self, task: FromGroup) -> None:
        """Receive each tensor into one buffer, which is allocated before anything is written."""
        if (group := self._group) is None:
            raise ValueError("there is no group: create it with /init_weights_update_group")
        announced = {spec[0]: empty_like(*spec) for spec in zip(task.names, task.dtypes, task.shapes, strict=True)}
        names = self._model.config.architecture.names_of(announced)  # the model's to the sender's
        update = WeightUpdate(self._model, {known: InMemory(announced[name]) for known, name in names.items()}, is_whole=False)
        size = max(each.nbytes for each in announced.values())
        buffer = torch.empty(size, dtype=torch.uint8, device=self._model.device)
        known_of = {name: known for known, name in names.items()}

        def received() -> Iterator[tuple[str, Stored]]:
            for name, meta in announced.items():
                tensor = buffer[: meta.nbytes].view(meta.dtype).view(meta.shape)
                broadcast(group, tensor)
                yield known_of.get(name, name), InMemory(tensor)

        self._write(update, received())

    def _write(self, update: WeightUpdate, tensors: Iterable[tuple[str, Stored]]) -> None:
        self._synchronize()
        try:
            for name, tensor in tensors:
                update.write(name, tensor)
            update.finish()
            self._synchronize()
        except FAILURES as failure:
            self._child.failed(f"some weights were already replaced, so the engine exits: {explain(failure)}")
            os._exit(1)
        self._forget()

    def _join(self, task: JoinGroup) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        rank = task.rank_offset + self._rank
        try:
            self._group = join(task.group_name, task.backend, task.master_address, task.master_port, rank, task.world_size)
        except dist.DistError as problem:
            raise ValueError(f"the group could not be joined: is its rank 0 running? {problem}") from None

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def empty_like(name: str, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor on the meta device. ValueError for a dtype that no checkpoint has."""
    if (known := DTYPES.get(dtype.removeprefix("torch."))) is None:
        raise ValueError(f"tensor {name}: dtype {dtype[:40]} is not one of {', '.join(DTYPES)}")
    return torch.empty(shape, dtype=known, device="meta")


def join(name: str, backend: str, address: str, port: int, rank: int, size: int) -> dist.ProcessGroup:
    """Return the group when all have joined; rank 0 listens at the address. It is created like SGLang's `init_custom_process_group`.
    RuntimeError or ValueError after the timeout."""
    host = f"[{address}]" if ":" in address else address
    store, _, _ = next(rendezvous(f"tcp://{host}:{port}", rank, size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    group, _ = _new_process_group_helper(size, rank, [], backend, dist.PrefixStore(name, store), GroupName(name), timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)  # for a member
    dist.distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}  # for the functions of torch.distributed
    return group


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Broadcast rank 0's tensor to all ranks, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor], options).wait()
