"""Messages of weight updates.

| edge                | message     |
|---------------------|-------------|
| api -> scheduler    | Order       |
| scheduler -> api    | OrderDone   |
| scheduler -> worker | Order       |
| worker -> scheduler | OrderResult |
"""

import msgspec

UPDATES_INBOX = "updates"  # name of the api's inbox
FIRST_VERSION = "default"


class Pause(msgspec.Struct, tag=True, frozen=True):
    """End all requests, and start none until a Resume."""


class Resume(msgspec.Struct, tag=True, frozen=True): ...


class FromFolder(msgspec.Struct, tag=True, frozen=True):
    path: str


class FromGroup(msgspec.Struct, tag=True, frozen=True):
    """Tensors that rank 0 of a group broadcasts in this order, with checkpoints' names and torch's dtypes."""

    group_name: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class JoinGroup(msgspec.Struct, tag=True, frozen=True):
    """Join a process group as ranks `rank_offset`, ...; rank 0, a trainer, listens at the address."""

    group_name: str
    backend: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


class LeaveGroup(msgspec.Struct, tag=True, frozen=True):
    group_name: str


class Order(msgspec.Struct, tag=True, frozen=True):
    """Task, executed when the running requests have finished, or were aborted. Afterwards the weights have the version, if any."""

    number: int
    task: Pause | Resume | FromFolder | FromGroup | JoinGroup | LeaveGroup
    aborts: bool = False
    version: str | None = None


class OrderResult(msgspec.Struct, tag=True, frozen=True):
    """Result of a rank. `problem`: why it has written nothing."""

    problem: str | None = None


class OrderDone(msgspec.Struct, tag=True, frozen=True):
    """Result of an order, with the version of the weights."""

    number: int
    version: str
    problem: str | None = None
