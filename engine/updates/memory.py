"""Tensors in memory shared by processes of a host, described by plain fields instead of pickle.

CPU: a file in /dev/shm. GPU: the handle of an allocation (CUDA IPC). The owner must keep the memory until the other process has read it."""

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from engine.wire.updates import CudaMemory, Segment, TensorSpec
from models.checkpoint.update import DTYPES

FOLDER = Path("/dev/shm")
NAME = re.compile(r"[\w-][\w.-]{0,99}")
ALIGNMENT = 64


def opened_tensor(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Return another process's tensor. ValueError if this rank cannot read its memory."""
    dtype = dtype_of(spec)
    if isinstance(place := spec.places.get("cpu"), Segment):
        return _read_segment(spec, place, dtype)
    uuids = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    order = sorted(uuids, key=lambda uuid: uuids[uuid] != device.index)  # this rank's GPU first
    found = next(((uuid, memory) for uuid in order if isinstance(memory := spec.places.get(uuid), CudaMemory)), None)
    if found is None:
        raise ValueError(f"tensor {spec.name} has no memory that rank {device.index or 0} can read: {', '.join(spec.places)[:200]}")
    uuid, memory = found
    tensor: torch.Tensor = rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size(spec.shape),
        memory.stride,
        memory.offset,
        TypedStorage,
        dtype,
        uuids[uuid],
        memory.handle,
        memory.storage_size_bytes,
        memory.storage_offset_bytes,
        False,
        memory.ref_counter_handle,
        memory.ref_counter_offset,
        memory.event_handle,
        memory.event_sync_required,
    )
    return tensor


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the dtype. ValueError for one that no checkpoint has."""
    if (dtype := DTYPES.get(spec.dtype.removeprefix("torch."))) is None:
        raise ValueError(f"tensor {spec.name}: dtype {spec.dtype[:40]} is not one of {', '.join(DTYPES)}")
    return dtype


def _read_segment(spec: TensorSpec, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    if not NAME.fullmatch(segment.name):
        raise ValueError(f"tensor {spec.name}: a segment must be the name of a file in {FOLDER}")
    size = dtype.itemsize * torch.Size(spec.shape).numel()
    try:
        file = os.open(FOLDER / segment.name, os.O_RDWR | os.O_NOFOLLOW)  # torch does not support read-only buffers
    except OSError:
        raise ValueError(f"tensor {spec.name}: the segment {segment.name} cannot be opened") from None
    try:
        if segment.offset < 0 or segment.offset + size > os.fstat(file).st_size:
            raise ValueError(f"tensor {spec.name} is not within its segment")
        values = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8, count=size, offset=segment.offset) if size else torch.empty(0)
    finally:
        os.close(file)
    return values.view(dtype).view(spec.shape) if size else torch.empty(spec.shape, dtype=dtype)


@contextmanager
def shared(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[TensorSpec]]:
    """Yield descriptions of tensors for another process, valid within the context. Tensors on the CPU are copied to a segment."""
    path = FOLDER / f"weights-{os.getpid()}-{os.urandom(8).hex()}"
    kept: list[torch.Tensor] = []
    try:
        offsets = _write_segment(path, {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_cuda})
        specs = []
        for name, tensor in tensors.items():
            if name in offsets:
                places: dict[str, Segment | CudaMemory] = {"cpu": Segment(path.name, offsets[name])}
            else:
                kept.append(tensor.detach().contiguous())
                places = {str(torch.cuda.get_device_properties(tensor.device).uuid): cuda_memory(kept[-1])}
            specs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), places))
        yield specs
    finally:
        path.unlink(missing_ok=True)


def _write_segment(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Copy tensors to a new file and return their offsets in it."""
    *offsets, end = accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()), initial=0)
    memory = torch.from_file(str(path), shared=True, size=end + 1, dtype=torch.uint8)
    for offset, tensor in zip(offsets, tensors.values(), strict=True):
        memory[offset : offset + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
    return dict(zip(tensors, offsets, strict=True))


def cuda_memory(tensor: torch.Tensor) -> CudaMemory:
    """Return the handle of a tensor on a GPU, from torch's reduction of it."""
    _, fields = reduce_tensor(tensor)
    _, _, stride, offset, _, _, _, handle, size, start, _, ref_counter, ref_counter_offset, event, is_event_needed = fields
    return CudaMemory(
        handle=handle,
        storage_size_bytes=size,
        storage_offset_bytes=start,
        ref_counter_handle=ref_counter,
        ref_counter_offset=ref_counter_offset,
        event_handle=event,
        event_sync_required=is_event_needed,
        offset=offset,
        stride=tuple(stride),
    )
