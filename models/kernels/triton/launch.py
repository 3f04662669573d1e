"""Launches of Triton kernels, and helpers of kernels.

Triton's own `kernel[grid](...)` takes 16 us of host time on a machine with H200s, since it specialises and hashes all arguments; a call of
the driver takes 3 us.
"""

import ctypes
import logging
import re
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import compress
from typing import Any, cast

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

OVERLAP_CAPABILITY = (9, 0)  # compute capability from which programmatic dependent launch is available
CODES = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f"}  # of `struct` for types of Triton; pointers are "P"
PARAMETERS = re.compile(r"\.entry[^(]*\(([^)]*)\)")  # of a kernel in PTX
BITS = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)")
CONFIG = "3I3IIPPI"  # CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes and their number
OVERLAPS = ctypes.create_string_buffer(struct.pack("i4xi60x", 6, 1))  # CUlaunchAttribute: programmaticStreamSerialization
REST = ((), (1, 1), (1,), ())  # dimensions that a grid of so many lacks

Launch = Callable[[tuple[int, ...], tuple[Any, ...]], None]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(least: int) -> int:
    """Return the smallest power of two that is at least `least`. Triton's own function takes 3 us."""
    return 1 << (least - 1).bit_length()


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, (0, 0) for a CPU with Triton's interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


class Kernel:
    """A kernel of `triton.jit`. The first launch with arguments of such types is Triton's, later ones are calls of the driver.

    A kernel that has OVERLAP waits for the previous kernel itself, where programmatic dependent launch is available. All launches of a
    process are on one device, and integers have 32 bits."""

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self._overlaps = "OVERLAP" in jitted.arg_names
        self._launches: dict[Any, Launch | None] = {}  # None: Triton launches
        self._functions: dict[str, Callable[..., None]] = {}  # by kinds of arguments
        self._kinds = ""
        self._launch: Callable[..., None] = self._learn if isinstance(jitted, JITFunction) else self._launch_by_triton

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch_by_triton(self, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        if self._overlaps and "OVERLAP" not in options:
            device = next(each.device for each in args if isinstance(each, torch.Tensor))
            options |= {"OVERLAP": True, "launch_pdl": True} if capability_of(device) >= OVERLAP_CAPABILITY else {"OVERLAP": False}
        return self.jitted[grid](*args, **options)

    def _learn(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch with arguments of any kinds, and expect the same kinds from now on."""
        kinds = "".join(map(kind_of, args))
        if kinds not in self._functions:
            names = {"launches": self._launches, "learn": self._learn, "bind": self._bind, "launch_by_triton": self._launch_by_triton}
            exec(source_of(kinds, self.jitted.params), names)
            self._functions[kinds] = cast(Callable[..., None], names["launch"])
        self._launch = self._functions[kinds]
        self._launch(grid, *args, **options)

    def _bind(self, key: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Launch for the first time with arguments of such types."""
        launch = launch_of(self._launch_by_triton(grid, *args, **options))
        params = self.jitted.params
        kept = [not (kind_of(x) == "i" and x == 1 and not p.do_not_specialize) for x, p in zip(args, params, strict=False) if x is not None]
        if launch is None or all(kept):
            self._launches[key] = launch
        else:  # Triton compiles ones in
            self._launches[key] = lambda grid, values: launch(grid, tuple(compress(values, kept)))


def kind_of(x: object) -> str:
    """Return t for a tensor, s for several, i for an integer, n for None, v for another value."""
    if isinstance(x, torch.Tensor | tuple):
        return "s" if isinstance(x, tuple) else "t"
    return "n" if x is None else "i" if type(x) is int else "v"


def source_of(kinds: str, params: Sequence[Any]) -> str:
    """Return the source of `launch(grid, *args, **options)` for arguments of these kinds. Written out, it takes half the time of a loop.
    The key has what Triton compiles a kernel for."""
    addresses, key, values = [], [], []
    for i, (kind, param) in enumerate(zip(kinds, params, strict=False)):
        is_divided = not (param.do_not_specialize or param.do_not_specialize_on_alignment)
        if kind == "t":
            addresses.append(f"p{i} = a{i}.data_ptr()")
            key += [f"a{i}.dtype", *([f"p{i} & 15"] if is_divided else [])]
        elif kind == "s":
            addresses.append(f"p{i} = [x.data_ptr() for x in a{i}]")
            key += [f"*(x.dtype for x in a{i})", f"any(x & 15 for x in p{i})"]
        elif kind == "i" and not param.do_not_specialize:
            key += [f"a{i} == 1", f"a{i} & 15 == 0"]
        values += {"t": [f"p{i}"], "s": [f"*p{i}"], "n": []}.get(kind, [f"a{i}"])
    names = ", ".join(f"a{i}" for i in range(len(kinds)))
    return "\n    ".join(
        (
            f"def launch(grid, {names}, **options):",
            "try:",
            *(f"    {each}" for each in addresses),
            f"    key = {', '.join(key)}, *options, *options.values()",
            "except (AttributeError, TypeError):",
            f"    return learn(grid, {names}, **options)",
            f"if {' or '.join(f'a{i} is not None' for i, kind in enumerate(kinds) if kind == 'n') or False}:",
            f"    return learn(grid, {names}, **options)",
            "if key not in launches:",
            f"    return bind(key, grid, ({names},), options)",
            "if (found := launches[key]) is None:",
            f"    return launch_by_triton(grid, {names}, **options)",
            f"found(grid, ({', '.join(values)},))",
        )
    )


def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate a kernel, with options of `triton.jit`."""
    return lambda function: Kernel(triton.jit(function, **options))


def parameters_of(compiled: Any) -> str | None:
    """Return codes of `struct` for the parameters of a compiled kernel, None if they are not what is expected: those of its signature and
    the addresses of two scratch memories, which no kernel of ours uses."""
    signature = [each for types in compiled.src.signature.values() for each in (types if isinstance(types, tuple) else (types,))]
    codes = [CODES.get(each, "P" if each.startswith("*") else "") for each in signature if each != "constexpr"]
    found = PARAMETERS.search(compiled.asm["ptx"])
    bits = [] if found is None else [int(each) for each in BITS.findall(found[1])]
    meta = compiled.metadata
    is_plain = meta.num_ctas == 1 and not (meta.global_scratch_size or meta.profile_scratch_size or meta.launch_cooperative_grid)
    codes += ["P", "P"]
    return "".join(codes) if is_plain and all(codes) and bits == [8 * struct.calcsize(code) for code in codes] else None


def launch_of(compiled: Any) -> Launch | None:
    """Return a function that launches a kernel with a grid and its parameters, None (with one line in the log) if Triton must do it."""
    codes, launch_kernel = parameters_of(compiled), driver_function()
    if codes is None or launch_kernel is None:
        logger.warning("Triton %s has other parameters of kernels than expected: launches take longer", triton.__version__)
        return None
    meta, function, name, places, packing = compiled.metadata, compiled.function, compiled.metadata.name, [], threading.Lock()
    packed = struct.Struct(CONFIG + codes)
    memory = ctypes.create_string_buffer(packed.size)
    for i, code in enumerate(codes, len(CONFIG) + 1):
        places.append(ctypes.addressof(memory) + struct.calcsize((CONFIG + codes)[:i]) - struct.calcsize(code))
    config, parameters = ctypes.addressof(memory), (ctypes.c_void_p * len(places))(*places)
    block, overlaps = (32 * meta.num_warps, 1, 1, meta.shared), (ctypes.addressof(OVERLAPS), int(meta.launch_pdl))
    pack, device, stream_of = packed.pack_into, driver.active.get_current_device(), driver.active.get_current_stream

    def launch(grid: tuple[int, ...], values: tuple[Any, ...]) -> None:
        with packing:  # kernels are checked in a thread while weights are loaded
            pack(memory, 0, *grid, *REST[len(grid)], *block, stream_of(device), *overlaps, *values, 0, 0)
            error = launch_kernel(config, function, parameters, None)
        if error:
            raise RuntimeError(f"the launch of {name} failed with CUDA's error {error}")

    return launch


@cache
def driver_function() -> Any:
    """Return the driver's `cuLaunchKernelEx`, None if it has none."""
    try:
        function = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx
    except AttributeError:
        return None
    function.argtypes = [ctypes.c_void_p] * 4
    return function


@triton.jit
def await_previous_kernel(OVERLAP: constexpr) -> None:
    """Wait until the previous kernel's writes are visible, and let the next kernel start."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def await_kernel(OVERLAP: constexpr) -> None:
    """Wait like `await_previous_kernel`, without letting the next kernel start."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def floats(place: tensor, mask: tensor) -> tensor:
    """Load values as float32, 0 outside the mask."""
    return tl.load(place, mask, 0.0).to(tl.float32)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, 1 on a CPU with Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
