"""Servers that several tests share: the first test that needs one starts it, and it is closed after the last one (`tests/conftest.py`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")

_running: dict[str, tuple[AbstractContextManager[Any], Any]] = {}


def shared(name: str, start: Callable[[], AbstractContextManager[T]]) -> T:
    """Return the server of this name; start it unless it runs already."""
    if name not in _running:
        context = start()
        _running[name] = context, context.__enter__()
    server = _running[name][1]
    return server


def close_shared(*names: str) -> None:
    """Stop these servers, or all of them. Raises what their ends raise."""
    for name in names or list(_running):
        if name in _running:
            _running.pop(name)[0].__exit__(None, None, None)
