"""The scheduler's check of itself: in parts, so that a request that comes meanwhile waits for one of them."""

import time
from typing import Any

import pytest

from engine.messages import Forget
from engine.scheduler.blocks import CHECKED_AT_ONCE, BlockPool
from engine.scheduler.main import HEARTBEAT_S, Scheduler


class Inbox:
    """A message comes after some polls, as others would in the time that these take."""

    def __init__(self, num_polls: int):
        self.num_polls = num_polls

    def recv_ready(self) -> Any:
        self.num_polls -= 1
        return Forget(images=False) if self.num_polls == 0 else None

    def recv(self, timeout: float) -> None:
        return None


class Core:
    drafter, num_requests, num_checked, num_forgotten = None, 0, 0, 0

    def checks(self) -> Any:
        for _ in range(10):
            self.num_checked += 1
            yield

    def forget_all(self, images: bool) -> None:
        self.num_forgotten += 1


def idle_scheduler(num_polls: int) -> Any:
    scheduler = Scheduler.__new__(Scheduler)
    scheduler._inbox = Inbox(num_polls)  # type: ignore[assignment]
    scheduler._quiet_since, scheduler._checked, scheduler._checks = time.monotonic() - HEARTBEAT_S, False, iter(())
    return scheduler


def test_a_message_waits_for_one_part_of_the_check() -> None:
    scheduler, core = idle_scheduler(num_polls=3), Core()
    scheduler._receive(core)
    assert core.num_checked == 0
    scheduler._receive(core)
    assert (core.num_checked, core.num_forgotten) == (3, 1)
    scheduler._receive(core)
    assert core.num_checked == 3, "a check must not go on with a state that has changed"


def test_without_messages_the_check_ends_and_is_not_repeated() -> None:
    scheduler, core = idle_scheduler(num_polls=-1), Core()
    for _ in range(4):
        scheduler._receive(core)
    assert core.num_checked == 10


def test_blocks_are_checked_in_slices() -> None:
    pool = BlockPool(3 * CHECKED_AT_ONCE + 1, 16)
    assert sum(1 for _ in pool.checks()) == 4
    blocks = pool.alloc(2)
    assert blocks is not None
    pool.commit(blocks[0], b"x" * 16)
    pool.check()
    pool._refs[blocks[1]] = 0
    with pytest.raises(AssertionError):
        pool.check()
