"""A bounded shared-memory arena: one memfd, one writer that allocates and frees, any number of readers.

The api writes one (request payloads), the processor the other (token ids, image bytes). Children inherit the descriptors: nothing has a
name in the file system, and the kernel frees all of it with the last process.

The first RESIDENT_BYTES always have memory. The writer reserves memory beyond them before a region lies there, so that no write fails, and
gives it back when the arena is empty.

     0        64       192                      size
     | region | free   | region  | free ...      |      offsets are multiples of 64, neighbouring free ranges are always merged
"""

import asyncio
import bisect
import contextlib
import mmap
import os

ALIGNMENT = 64
RESIDENT_BYTES = 128 << 20
STEP_BYTES = 16 << 20  # reserved or given back at once: about 2 ms


class ArenaFull(Exception):
    """No free range is large enough now."""


class ArenaTooSmall(ValueError):
    """The region can never fit."""


def create_memfd(name: str, size: int) -> int:
    """Return an inheritable memfd of `size` bytes that has memory for the first RESIDENT_BYTES. Raises OSError."""
    fd = os.memfd_create(name, 0)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, min(size, RESIDENT_BYTES))
    except OSError:
        os.close(fd)
        raise
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
    """Mapped arena; `buffer` is all of it."""

    def __init__(self, fd: int, size: int, writable: bool = False):
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        self.buffer = memoryview(self._map)

    def view(self, offset: int, length: int) -> memoryview:
        """Return a view without copying. Raises IndexError outside the arena."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise IndexError(f"range {offset}+{length} lies outside the arena of {self.size} bytes")
        return self.buffer[offset : offset + length]


class Arena(ArenaView):
    """Writer's side of an arena, with first-fit allocation. Not thread-safe.

    Invariant (`check`): allocated and free ranges tile `[0, size)`, and no two free ranges touch.
    """

    def __init__(self, fd: int, size: int):
        super().__init__(fd, size, writable=True)
        self._free_starts, self._free_ends = [0], [size]
        self._allocated: dict[int, int] = {}  # offset -> end
        self._reserved = min(size, RESIDENT_BYTES)  # bytes from the beginning that have memory

    def is_empty(self) -> bool:
        return not self._allocated

    @property
    def num_free(self) -> int:
        return sum(self._free_ends) - sum(self._free_starts)

    def alloc(self, length: int) -> int:
        """Return the offset of a new region of at least `length` bytes. Raises ArenaTooSmall (never fits) or ArenaFull (not now)."""
        if (need := _aligned(length)) > self.size:
            raise ArenaTooSmall(f"{length} bytes exceed the arena of {self.size} bytes")
        if (offset := self.find(length)) is None:
            raise ArenaFull(f"no space for {length} bytes")
        self._take(bisect.bisect_left(self._free_starts, offset), need)
        self._allocated[offset] = offset + need
        try:
            self._reserve(offset + length)
        except OSError as problem:
            self.free(offset)
            raise ArenaFull(f"no memory for {length} bytes") from problem
        return offset

    def find(self, length: int) -> int | None:
        """Return the offset that `alloc` would return now; None if no free range is large enough."""
        need = _aligned(length)
        ranges = zip(self._free_starts, self._free_ends, strict=True)
        return next((start for start, end in ranges if end - start >= need), None)

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

    def check(self) -> None:
        ranges = sorted([*self._allocated.items(), *zip(self._free_starts, self._free_ends, strict=True)])
        cursor = 0
        for start, end in ranges:
            assert start == cursor and end > start, f"hole or overlap at {start}, expected {cursor}"
            cursor = end
        assert cursor == self.size
        for end, start in zip(self._free_ends, self._free_starts[1:], strict=False):
            assert end < start, "two free ranges touch"

    async def prepare(self, length: int, offset: int | None = None) -> None:
        """Reserve memory for the next region of `length` bytes, or for one at `offset`, in steps that yield to the event loop."""
        with contextlib.suppress(OSError):  # `alloc` reports it again
            while (start := self.find(length) if offset is None else offset) is not None:
                if start + length <= self._reserved + STEP_BYTES:
                    return
                self._reserve(self._reserved + STEP_BYTES)
                await asyncio.sleep(0)

    def has_memory(self, length: int) -> bool:
        """Return whether `alloc(length)` reserves at most STEP_BYTES."""
        start = self.find(length)
        return start is None or start + length <= self._reserved + STEP_BYTES

    def trim(self) -> None:
        """Release some memory if the arena is empty. Call it repeatedly while the arena is idle."""
        start = max(RESIDENT_BYTES, self._reserved - STEP_BYTES)
        if self.is_empty() and start < self._reserved:
            self._map.madvise(mmap.MADV_REMOVE, start, self._reserved - start)
            self._reserved = start

    def grow(self, offset: int, used: int, length: int) -> int:
        """Extend the region at `offset` to `length` bytes, moving its first `used` bytes if necessary. Return its offset."""
        capacity = self._allocated[offset] - offset
        if self._extend(offset, length):
            try:
                self._reserve(offset + length)
            except OSError as problem:
                self.shrink(offset, capacity)
                raise ArenaFull(f"no memory for {length} bytes") from problem
            return offset
        moved = self.alloc(length)
        self.buffer[moved : moved + used] = self.buffer[offset : offset + used]
        self.free(offset)
        return moved

    def _take(self, i: int, need: int) -> None:
        self._free_starts[i] += need
        if self._free_starts[i] == self._free_ends[i]:
            del self._free_starts[i], self._free_ends[i]

    def _reserve(self, end: int) -> None:
        """Reserve memory up to `end`, rounded up to whole pages. Raises OSError."""
        if end > self._reserved:
            end = min(self.size, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
            os.posix_fallocate(self.fd, self._reserved, end - self._reserved)
            self._reserved = end


def _aligned(length: int) -> int:
    return max(ALIGNMENT, -(-length // ALIGNMENT) * ALIGNMENT)
