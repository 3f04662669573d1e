"""Concurrent compilation of Triton's kernels before their first launch."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


class Thread(threading.local):
    compiler: Callable[..., None] | None = None  # of kernels that are not launched; None: they are launched


THIS_THREAD = Thread()


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Compile Triton's kernels, each version once, instead of launching them in this thread. All else runs, so results are undefined: code
    that uses them as addresses must not run, or gets zeros. A compilation that fails is repeated by the first launch, which raises."""
    added = set[Any]()

    def compile(jitted: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        version = jitted, *map(_version_of, jitted.params, args), *options.items()
        if version not in added:
            added.add(version)
            types = [each.dtype if isinstance(each, torch.Tensor) else each for each in args]  # no memory is kept
            pool.submit(jitted.warmup, *types, grid=grid, **options)

    with ThreadPoolExecutor(initializer=partial(torch.cuda.set_device, device)) as pool:
        THIS_THREAD.compiler = compile
        try:
            yield
        finally:
            THIS_THREAD.compiler = None


def _version_of(parameter: Any, value: Any) -> Any:
    """Return what Triton distinguishes of an argument; tensors are aligned."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, int) and not parameter.is_constexpr:
        return not parameter.do_not_specialize and (value == 1, value % 16 == 0), value >> 31 == 0
    return value
