"""Launches of a piece of a model, captured once and repeated with other addresses.

    CUDA stream ── capture ──▶ CUDA graph ── functions, grids, parameters ──▶ `Launches` ── other addresses ──▶ the driver's launches

Python needs 0.3 to 0.6 ms for the launches of a layer, the driver 0.03. Parameters are copied as they are: an aligned word of eight bytes
that is an address in a given range is moved with the range. That includes the address at the start of a descriptor of the tensor memory
accelerator.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

RELAXED = 2  # CUstreamCaptureMode: other threads, and torch's allocator in this one, may allocate
KERNEL, MEMSET = 0, 2  # CUgraphNodeType
COOPERATIVE, CLUSTER, OVERLAPS = 2, 4, 6  # CUlaunchAttributeID
PROGRAMMATIC = 1  # CUgraphDependencyType
WORD = 8
BUFFER = 1  # CU_LAUNCH_PARAM_BUFFER_POINTER

Words = npt.NDArray[np.uint64]


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", 3 * ctypes.c_uint),
        ("block", 3 * ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.POINTER(ctypes.c_void_p)),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class MemsetNode(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", 16 * ctypes.c_int))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", 3 * ctypes.c_uint),
        ("block", 3 * ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte), ("reserved", 5 * ctypes.c_ubyte))


class Unsupported(Exception):
    """The captured work cannot be repeated."""


@cache
def driver() -> Any:
    cuda = ctypes.PyDLL("libcuda.so.1")
    cuda.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return cuda


def check(error: int, what: str) -> None:
    if error:
        raise Unsupported(f"{what} returns CUDA's error {error}")


def capture(call: Callable[[], object]) -> "Captured":
    """Capture the launches of `call` on the current stream, which is not the default one, without executing them. Unsupported if they
    cannot be repeated; nothing was executed then, either."""
    cuda, stream, graph = driver(), torch.cuda.current_stream().cuda_stream, ctypes.c_void_p()
    check(cuda.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), RELAXED), "cuStreamBeginCapture")
    try:
        call()
    finally:
        error = cuda.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
    check(error, "cuStreamEndCapture")
    try:
        return Captured(graph, stream)
    finally:
        cuda.cuGraphDestroy(graph)


class Captured:
    """The launches of a graph in their order, and their parameters as words."""

    def __init__(self, graph: ctypes.c_void_p, stream: int) -> None:
        self._calls: list[tuple[Callable[..., int], int, int, int]] = []
        self._kept: list[object] = []
        offsets: list[int] = []  # of all parameters, in bytes
        content: list[bytes] = []
        size = 0
        for node, overlaps in nodes_of(graph):
            launch, first, second, layout, parameters = launch_of(node, stream, overlaps, self._kept)
            self._calls.append((launch, first, second, WORD * len(offsets)))
            offsets += [size + offset for offset in layout]
            content.append(parameters)
            size += len(parameters)
        self.words: Words = np.frombuffer(b"".join(content), dtype=np.uint64)
        self._offsets = np.array(offsets, dtype=np.uint64)

    def run(self, words: Words) -> None:
        """Launch with these parameters, which the driver copies."""
        addresses = self._offsets + np.uint64(words.ctypes.data)
        start = addresses.ctypes.data
        for launch, first, second, offset in self._calls:
            if error := launch(first, second, start + offset, None):
                raise RuntimeError(f"a repeated launch failed with CUDA's error {error}")


def moved(words: Words, starts_R: Words, ends_R: Words, distances_CR: Words) -> Words:
    """Return C copies of the words, those in a range moved by its distance in each copy. A range inside another one is moved with it."""
    order = np.lexsort((-ends_R.astype(np.int64), starts_R))
    outer = order[ends_R[order] > np.concatenate(([0], np.maximum.accumulate(ends_R[order])[:-1]))]
    index = np.searchsorted(starts_R[outer], words, side="right").astype(np.int64) - 1
    places = np.flatnonzero((index >= 0) & (words < ends_R[outer][index]))
    copies = np.repeat(words[None], len(distances_CR), axis=0)
    copies[:, places] += distances_CR[:, outer[index[places]]]
    return copies


def nodes_of(graph: ctypes.c_void_p) -> list[tuple[ctypes.c_void_p, bool]]:
    """Return the nodes in order, and whether each may begin while the one before still runs."""
    cuda, count = driver(), ctypes.c_size_t()
    check(cuda.cuGraphGetNodes(graph, None, ctypes.byref(count)), "cuGraphGetNodes")
    nodes = (ctypes.c_uint64 * count.value)()
    check(cuda.cuGraphGetNodes(graph, nodes, ctypes.byref(count)), "cuGraphGetNodes")
    if not hasattr(cuda, "cuGraphGetEdges_v2"):
        raise Unsupported("an old driver")
    check(cuda.cuGraphGetEdges_v2(graph, None, None, None, ctypes.byref(count)), "cuGraphGetEdges")
    sources, targets, data = (ctypes.c_uint64 * count.value)(), (ctypes.c_uint64 * count.value)(), (EdgeData * count.value)()
    check(cuda.cuGraphGetEdges_v2(graph, sources, targets, data, ctypes.byref(count)), "cuGraphGetEdges")
    before: dict[int, list[tuple[int, bool]]] = {node: [] for node in nodes}
    for source, target, edge in zip(sources, targets, data, strict=True):
        before[target].append((source, edge.type == PROGRAMMATIC))
    found, done = [], [0]
    for node in nodes:  # they come as they were captured
        if not all(source in done for source, _ in before[node]):
            raise Unsupported("nodes in another order")
        found.append((ctypes.c_void_p(node), before[node] == [(done[-1], True)]))
        done.append(node)
    return found


@cache
def layout_of(function: int, is_kernel: bool) -> tuple[tuple[int, int], ...]:
    """Return the offset and size of each parameter."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    found: list[tuple[int, int]] = []
    info = driver().cuKernelGetParamInfo if is_kernel else driver().cuFuncGetParamInfo
    while info(ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        found.append((offset.value, size.value))
    return tuple(found)


def launch_of(
    node: ctypes.c_void_p, stream: int, overlaps: bool, kept: list[object]
) -> tuple[Callable[..., int], int, int, list[int], bytes]:
    """Return a function, its first two arguments, the offsets of the parameters and these, as words. `kept`: receives what must stay."""
    cuda, kind = driver(), ctypes.c_int()
    check(cuda.cuGraphNodeGetType(node, ctypes.byref(kind)), "cuGraphNodeGetType")
    if kind.value == MEMSET:
        memory = MemsetNode()
        check(cuda.cuGraphMemsetNodeGetParams(node, ctypes.byref(memory)), "cuGraphMemsetNodeGetParams")
        if memory.height != 1:
            raise Unsupported("memory in rows")
        return partial(_set_memory, memory, stream), 0, 0, [0], bytes(memory)[:WORD]
    if kind.value != KERNEL:
        raise Unsupported(f"a node of type {kind.value}")
    found = KernelNode()
    check(cuda.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(found)), "cuGraphKernelNodeGetParams")
    function = found.function or found.kernel
    layout = layout_of(function, not found.function)
    content = bytearray(max((-(-(offset + size) // WORD) * WORD for offset, size in layout), default=0))
    if found.parameters:
        for i, (offset, size) in enumerate(layout):
            content[offset : offset + size] = ctypes.string_at(found.parameters[i], size)
    elif content:
        content[:] = _block(found.extra, len(content))
    attributes = []
    for attribute in (COOPERATIVE, CLUSTER):
        each = Attribute(attribute)
        if cuda.cuGraphKernelNodeGetAttribute(node, attribute, ctypes.byref(each.value)) == 0 and any(each.value[:3]):
            attributes.append(each)
    if overlaps:
        attributes.append(Attribute(OVERLAPS, 0, (ctypes.c_int * 16)(1)))
    config = Config(found.grid, found.block, found.shared, stream, (Attribute * len(attributes))(*attributes), len(attributes))
    kept.append(config)
    return cuda.cuLaunchKernelEx, ctypes.addressof(config), function, [offset for offset, _ in layout], bytes(content)


def _block(extra: Any, size: int) -> bytes:
    """Return a kernel's parameters that were given as one block: pairs of a kind and a value, up to a kind of 0."""
    i = 0
    while extra and extra[i]:
        if extra[i] == BUFFER:
            return ctypes.string_at(extra[i + 1], size)
        i += 2
    raise Unsupported("a kernel without parameters")


def _set_memory(memory: MemsetNode, stream: int, _first: int, _second: int, addresses: int, _extra: None) -> int:
    target = ctypes.c_uint64.from_address(ctypes.c_uint64.from_address(addresses).value)
    function = getattr(driver(), f"cuMemsetD{8 * memory.size}Async")
    error: int = function(target, memory.value, ctypes.c_size_t(memory.width), ctypes.c_void_p(stream))
    return error
