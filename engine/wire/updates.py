"""Messages of weight updates.

| edge                | messages           |
|---------------------|--------------------|
| api -> scheduler    | Pause, Resume, Job |
| scheduler -> api    | OrderDone          |
| scheduler -> worker | Job, Verdict       |
| worker -> scheduler | JobState           |

Every rank prepares a job: it checks everything and writes nothing. Only if all ranks are prepared does the scheduler let them write.
"""

from typing import Literal

import msgspec

UPDATES_INBOX = "updates"  # name of the api's inbox
FIRST_VERSION = "default"

Drain = Literal["wait", "abort", "keep"]  # requests finish, end, or are computed again later


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Start no requests until a Resume. Answered when no request is running."""

    number: int
    drain: Drain


class Resume(msgspec.Struct, tag=True, frozen=True):
    number: int


class Segment(msgspec.Struct, tag="segment", frozen=True):
    """Bytes of a tensor in the shared-memory file `name` of the host."""

    name: str
    offset: int = 0


class CudaMemory(msgspec.Struct, tag="cuda", frozen=True):
    """Memory of another process on a GPU: the fields of torch's reduction of a CUDA tensor. `offset` and `stride` are in elements."""

    handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool
    offset: int
    stride: tuple[int, ...]


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor of an update by its name in checkpoints. `places`: its memory by device ("cpu" or the UUID of a GPU)."""

    name: str
    dtype: str  # as torch names it
    shape: tuple[int, ...]
    places: dict[str, Segment | CudaMemory] = {}


class FromFolder(msgspec.Struct, tag=True, frozen=True):
    path: str


class FromMemory(msgspec.Struct, tag=True, frozen=True):
    tensors: tuple[TensorSpec, ...]


class FromGroup(msgspec.Struct, tag=True, frozen=True):
    """Broadcasts of rank 0 of a group, in this order."""

    group: str
    tensors: tuple[TensorSpec, ...]


class JoinGroup(msgspec.Struct, tag=True, frozen=True):
    """Join a process group as ranks `first_rank`, ... of `size`; rank 0 waits at the address."""

    group: str
    backend: str
    address: str
    port: int
    first_rank: int
    size: int


class LeaveGroup(msgspec.Struct, tag=True, frozen=True):
    group: str


class Rename(msgspec.Struct, tag=True, frozen=True):
    """Change only the version."""


class Job(msgspec.Struct, tag=True, frozen=True):
    """Work of all workers while no request runs. Afterwards the weights have the version, if there is one."""

    number: int
    task: FromFolder | FromMemory | FromGroup | JoinGroup | LeaveGroup | Rename
    drain: Drain = "wait"
    version: str | None = None


class Verdict(msgspec.Struct, tag=True, frozen=True):
    """Execute the prepared job, or drop it."""

    is_granted: bool


class JobState(msgspec.Struct, tag=True, frozen=True):
    """A rank has prepared or executed the only current job. `problem`: the reason if it cannot."""

    problem: str | None = None


class OrderDone(msgspec.Struct, tag=True, frozen=True):
    """The answer to an order, with the version of the weights and the number of requests that wait."""

    number: int
    version: str
    num_waiting: int
    problem: str | None = None


Order = Pause | Resume | Job


def metadata_of(version: str) -> dict[str, str]:
    """Return the metadata of answers: the version of the weights."""
    return {"weight_version": version}


FIRST_METADATA = metadata_of(FIRST_VERSION)
