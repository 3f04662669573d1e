"""Messages of weight updates.

| edge                | messages            |
|---------------------|---------------------|
| api -> scheduler    | Pause, Resume, Job  |
| scheduler -> api    | OrderDone           |
| scheduler -> worker | Job, Verdict        |
| worker -> scheduler | JobState, Progress  |

Every rank prepares a job: it checks everything and writes nothing. Only if all ranks are prepared does the scheduler let them write.
"""

import msgspec

UPDATES_INBOX = "updates"  # name of the api's inbox
FIRST_VERSION = "default"


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Start no requests until a Resume. Running ones finish, or end now. Answered when no request is running."""

    number: int
    aborts: bool


class Resume(msgspec.Struct, tag=True, frozen=True):
    number: int


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor of an update by its name in checkpoints."""

    name: str
    dtype: str  # as torch names it
    shape: tuple[int, ...]


class FromFolder(msgspec.Struct, tag=True, frozen=True):
    path: str


class FromGroup(msgspec.Struct, tag=True, frozen=True):
    """Broadcasts of rank 0 of a group, in this order."""

    group: str
    tensors: tuple[TensorSpec, ...]


class JoinGroup(msgspec.Struct, tag=True, frozen=True):
    """Join a process group as ranks `first_rank`, ... of `size`; rank 0, a trainer, listens at the address."""

    group: str
    backend: str
    address: str
    port: int
    first_rank: int
    size: int


class LeaveGroup(msgspec.Struct, tag=True, frozen=True):
    group: str


class Job(msgspec.Struct, tag=True, frozen=True):
    """Work of all workers while no request runs: running ones finish, or end now. Afterwards the weights have the version, if any."""

    number: int
    task: FromFolder | FromGroup | JoinGroup | LeaveGroup
    aborts: bool = False
    version: str | None = None


class Verdict(msgspec.Struct, tag=True, frozen=True):
    """Execute the prepared job, or drop it."""

    is_granted: bool


class Progress(msgspec.Struct, tag=True, frozen=True):
    """A rank has read or received a tensor."""


class JobState(msgspec.Struct, tag=True, frozen=True):
    """A rank has prepared or executed the job. `problem`: the reason if it cannot; `is_whole`: it replaces all weights."""

    problem: str | None = None
    is_whole: bool = False


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
