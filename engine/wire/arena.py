"""A bounded shared-memory arena: one memfd, one writer that allocates and frees, any number of readers.

The api writes one (request payloads), the processor the other (token ids, image bytes). Children inherit the descriptors: nothing has a
name in the file system, and the kernel frees all of it with the last process.

All memory is reserved at the start, so that no write fails, and the engine's processes map it when they start: the first access to a page
would take 1 to 9 us.

     0        64       192                      size
     | region | free   | region  | free ...      |      offsets are multiples of 64, neighbouring free ranges are always merged
"""

import bisect
import contextlib
import mmap
import os

from engine.wire.messages import PROCESSOR_ARENA, Region

ALIGNMENT = 64
MIN_GROWTH = 1 << 20


class ArenaFull(Exception):
    """No free range is large enough now."""


class ArenaTooSmall(ValueError):
    """The region can never fit."""


def create_memfd(name: str, size: int) -> int:
    """Return an inheritable memfd of `size` bytes; `posix_fallocate` gives it memory."""
    fd = os.memfd_create(name, 0)
    os.ftruncate(fd, size)
    os.set_inheritable(fd, True)
    return fd


def memory_limit() -> int:
    """Return this process's memory limit: the machine's or its cgroup's."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:  # "max" is no limit
            limits.append(int(file.read()))
    return min(limits)


class ArenaView:
    """Mapped arena; `buffer` is all of it. `populate` maps every page at once."""

    def __init__(self, fd: int, size: int, writable: bool = False, populate: bool = False):
        self.fd = fd
        self.size = size
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self.buffer = memoryview(mmap.mmap(fd, size, flags, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)))

    def view(self, offset: int, length: int) -> memoryview:
        """Return a view without copying. Raises IndexError outside the arena."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise IndexError(f"range {offset}+{length} lies outside the arena of {self.size} bytes")
        return self.buffer[offset : offset + length]


class Arena(ArenaView):
    """Writer's side of the bytes from `start` to `size`, with first-fit allocation. Not thread-safe.

    Invariant: allocated and free ranges tile `[start, size)`, and no two free ranges touch.
    """

    def __init__(self, fd: int, size: int, start: int = 0):
        super().__init__(fd, size, writable=True, populate=True)
        self.start = start
        self._free_starts, self._free_ends = [start], [size]
        self._allocated: dict[int, int] = {}  # offset -> end

    def is_empty(self) -> bool:
        return not self._allocated

    def alloc(self, length: int) -> int:
        """Return the offset of a new region of at least `length` bytes. Raises ArenaTooSmall (never fits) or ArenaFull (not now)."""
        if (need := _aligned(length)) > self.size - self.start:
            raise ArenaTooSmall(f"{length} bytes exceed the arena of {self.size} bytes")
        for i, (start, end) in enumerate(zip(self._free_starts, self._free_ends, strict=True)):
            if end - start >= need:
                self._take(i, need)
                self._allocated[start] = start + need
                return start
        raise ArenaFull(f"no space for {length} bytes")

    def free(self, offset: int) -> None:
        """Release the region at `offset`. Raises KeyError if it is not allocated (a double free)."""
        end = self._allocated.pop(offset)
        i = bisect.bisect_left(self._free_starts, offset)
        joins_next = i < len(self._free_starts) and self._free_starts[i] == end
        joins_previous = i > 0 and self._free_ends[i - 1] == offset
        if joins_next:
            end = self._free_ends[i]
            del self._free_starts[i], self._free_ends[i]
        if joins_previous:
            self._free_ends[i - 1] = end
        else:
            self._free_starts.insert(i, offset)
            self._free_ends.insert(i, end)

    def _extend(self, offset: int, length: int) -> bool:
        """Extend the region at `offset` to `length` bytes in place; False if the next range is not free."""
        end = self._allocated[offset]
        need = _aligned(length)
        if offset + need <= end:
            return True
        i = bisect.bisect_left(self._free_starts, offset)
        if i < len(self._free_starts) and self._free_starts[i] == end and self._free_ends[i] >= offset + need:
            self._take(i, offset + need - end)
            self._allocated[offset] = offset + need
            return True
        return False

    def shrink(self, offset: int, length: int) -> None:
        """Free all but the first `length` bytes of the region at `offset`."""
        end = self._allocated[offset]
        keep = offset + _aligned(length)
        if keep < end:
            self._allocated[offset] = keep
            self._allocated[keep] = end
            self.free(keep)

    def grow(self, offset: int, used: int, length: int) -> int:
        """Extend the region at `offset` to `length` bytes, moving its first `used` bytes if necessary. Return its offset."""
        if self._extend(offset, length):
            return offset
        moved = self.alloc(length)
        self.buffer[moved : moved + used] = self.buffer[offset : offset + used]
        self.free(offset)
        return moved

    def _take(self, i: int, need: int) -> None:
        self._free_starts[i] += need
        if self._free_starts[i] == self._free_ends[i]:
            del self._free_starts[i], self._free_ends[i]


def _aligned(length: int) -> int:
    return max(ALIGNMENT, -(-length // ALIGNMENT) * ALIGNMENT)


class GrowingRegion:
    """One allocation and the position of its writer; its offset is final once it is complete. Raises ArenaFull or ArenaTooSmall."""

    def __init__(self, arena: Arena, capacity: int):
        self._arena = arena
        self.offset = arena.alloc(capacity)
        self.capacity = capacity
        self.used = 0

    @property
    def unused(self) -> memoryview:
        """Return the memory after the used bytes. Valid until the next `append`."""
        return self._arena.view(self.offset + self.used, self.capacity - self.used)

    @property
    def view(self) -> memoryview:
        """Return the used bytes. Valid until the next `append`."""
        return self._arena.view(self.offset, self.used)

    def wire(self) -> Region:
        """Return a reference to the used bytes, in the processor's arena, for other processes."""
        return Region(PROCESSOR_ARENA, self.offset, self.used)

    def append(self, data: bytes) -> None:
        """Append bytes. Capacity doubles, so that many small pieces cost no more than one large one."""
        need = self.used + len(data)
        if need > self.capacity:
            capacity = max(need, min(max(2 * self.capacity, self.capacity + MIN_GROWTH), self._arena.size - self._arena.start))
            self.offset, self.capacity = self._arena.grow(self.offset, self.used, capacity), capacity
        self.unused[: len(data)] = data
        self.used = need

    def trim(self) -> None:
        self._arena.shrink(self.offset, self.used)
        self.capacity = self.used

    def free(self) -> None:
        self._arena.free(self.offset)
