"""Messages of weight updates.

| edge                | message     |
|---------------------|-------------|
| api -> scheduler    | Order       |
| scheduler -> api    | OrderDone   |
| scheduler -> worker | Order       |
| worker -> scheduler | OrderResult |
"""

from typing import Literal

import msgspec

UPDATES_INBOX = "updates"  # name of the api's inbox
FIRST_VERSION = "default"


class FromFolder(msgspec.Struct, tag=True, frozen=True):
    path: str


class FromGroup(msgspec.Struct, tag=True, frozen=True):
    """Tensors that rank 0 of the group broadcasts in this order, with checkpoints' names and torch's dtypes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class JoinGroup(msgspec.Struct, tag=True, frozen=True):
    """Join a process group, instead of an earlier one, as ranks `rank_offset`, ...; rank 0, a trainer, listens at the address."""

    group_name: str
    backend: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


class Order(msgspec.Struct, tag=True, frozen=True):
    """Task, executed when the running requests have finished, or were aborted. Afterwards the weights have the version, if any. A pause
    ends all requests, and starts none until "resume"."""

    task: Literal["pause", "resume"] | FromFolder | FromGroup | JoinGroup
    aborts: bool = False
    version: str | None = None


class OrderResult(msgspec.Struct, tag=True, frozen=True):
    """Result of a rank. `problem`: why it has written nothing."""

    problem: str | None = None


class OrderDone(msgspec.Struct, tag=True, frozen=True):
    """Result of an order, with the version of the weights."""

    version: str
    problem: str | None = None
