"""Servers that several tests share: the first test that needs one starts it, and it is closed after the last one (`tests/conftest.py`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

T = TypeVar("T")

_running: dict[str, Any] = {}
_stack = ExitStack()


def shared(name: str, start: Callable[[], AbstractContextManager[T]]) -> T:
    """The server of this name, started now unless it runs already."""
    if name not in _running:
        _running[name] = _stack.enter_context(start())
    server: T = _running[name]
    return server


def close_shared() -> None:
    """Stop all of them. Raises what their ends raise."""
    _running.clear()
    _stack.close()
