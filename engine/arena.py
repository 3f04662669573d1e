"""A bounded shared-memory arena: one memfd, one writer that allocates and frees, any number of readers.

The api writes one (request payloads), the processor the other (token ids, image bytes). Children inherit the descriptors: nothing has a
name in the file system, and the kernel frees all of it with the last process.

     0        64       192                      size
     | region | free   | region  | free ...      |      offsets are multiples of 64, neighbouring free ranges are always merged
"""

import bisect
import contextlib
import mmap
import os

ALIGNMENT = 64


class ArenaFull(Exception):
    """No free range is large enough now."""


class ArenaTooSmall(ValueError):
    """It never fits."""


def create_memfd(name: str, size: int) -> int:
    """An inheritable memfd of `size` bytes whose pages are reserved, so that no write fails. Raises OSError."""
    fd = os.memfd_create(name, 0)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    os.set_inheritable(fd, True)
    return fd


def memory_limit() -> int:
    """Bytes that this process may use: of the machine or of its cgroup."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:  # "max" is no limit
            limits.append(int(file.read()))
    return min(limits)


class ArenaView:
    """A mapped arena; `buffer` is all of it."""

    def __init__(self, fd: int, size: int, writable: bool = False):
        self.fd = fd
        self.size = size
        self.buffer = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)))

    def view(self, offset: int, length: int) -> memoryview:
        """Not copied. Raises IndexError outside the arena."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise IndexError(f"range {offset}+{length} lies outside the arena of {self.size} bytes")
        return self.buffer[offset : offset + length]


class Regions:
    """First-fit allocation of ranges of `[0, size)`: offsets only. Not thread-safe.

    Invariant (`check`): allocated and free ranges tile `[0, size)`, and no two free ranges touch.
    """

    def __init__(self, size: int):
        self.size = size
        self._free_starts = [0] if size else []
        self._free_ends = [size] if size else []
        self._allocated: dict[int, int] = {}  # offset -> end

    def is_empty(self) -> bool:
        return not self._allocated

    def offsets(self) -> set[int]:
        """Of the allocated regions."""
        return set(self._allocated)

    @property
    def num_free(self) -> int:
        """Free bytes."""
        return sum(self._free_ends) - sum(self._free_starts)

    def can_hold(self, length: int) -> bool:
        """Whether a region of `length` bytes fits if it is the only one."""
        return _aligned(length) <= self.size

    def alloc(self, length: int) -> int | None:
        """Offset of a new region of at least `length` bytes; None if no free range is large enough."""
        need = _aligned(length)
        for i, start in enumerate(self._free_starts):
            if self._free_ends[i] - start >= need:
                self._take(i, need)
                self._allocated[start] = start + need
                return start
        return None

    def free(self, offset: int) -> None:
        """Releases the region at `offset`. Raises KeyError if it is not allocated (a double free)."""
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

    def extend(self, offset: int, length: int) -> bool:
        """Makes the region at `offset` hold `length` bytes in place; False if what follows is not free."""
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
        """Frees what follows the first `length` bytes of the region at `offset`."""
        end = self._allocated[offset]
        keep = offset + _aligned(length)
        if keep < end:
            self._allocated[offset] = keep
            self._allocated[keep] = end
            self.free(keep)

    def check(self) -> None:
        """Asserts the invariant."""
        ranges = sorted([*self._allocated.items(), *zip(self._free_starts, self._free_ends, strict=True)])
        cursor = 0
        for start, end in ranges:
            assert start == cursor and end > start, f"hole or overlap at {start}, expected {cursor}"
            cursor = end
        assert cursor == self.size
        for end, start in zip(self._free_ends, self._free_starts[1:], strict=False):
            assert end < start, "two free ranges touch"

    def _take(self, i: int, need: int) -> None:
        self._free_starts[i] += need
        if self._free_starts[i] == self._free_ends[i]:
            del self._free_starts[i], self._free_ends[i]


class Arena(ArenaView, Regions):
    """The writer's side. Not thread-safe."""

    def __init__(self, fd: int, size: int):
        ArenaView.__init__(self, fd, size, writable=True)
        Regions.__init__(self, size)

    def alloc(self, length: int) -> int:
        """Offset of a new region of at least `length` bytes. Raises ArenaTooSmall (never fits) or ArenaFull (not now)."""
        if not self.can_hold(length):
            raise ArenaTooSmall(f"{length} bytes exceed the arena of {self.size} bytes")
        offset = super().alloc(length)
        if offset is None:
            raise ArenaFull(f"no room for {length} bytes")
        return offset

    def grow(self, offset: int, used: int, length: int) -> int:
        """Makes the region at `offset` hold `length` bytes, moving its first `used` bytes if it must. Returns its offset."""
        if self.extend(offset, length):
            return offset
        moved = self.alloc(length)
        self.buffer[moved : moved + used] = self.buffer[offset : offset + used]
        self.free(offset)
        return moved


def _aligned(length: int) -> int:
    return max(ALIGNMENT, -(-length // ALIGNMENT) * ALIGNMENT)
