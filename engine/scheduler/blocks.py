"""Directory of KV blocks: ownership, names of block contents, eviction order.

A snapshot of a row's recurrent states occupies several blocks of the same pool, under the name of the last block before it. Evicting any of
its blocks evicts all of it.

   ref > 0                      ref == 0, in `_free` from least to most recently used
+-----------+   release    +---------------------------------------------+
|  in use   | -----------> | cached (hash known, may be matched) or blank |
+-----------+ <----------- +---------------------------------------------+
              acquire (hit) / alloc (evicts: the hash is forgotten)
"""

import bisect
import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from engine.wire.messages import ImageSpan

DIGEST_SIZE = 16


class FreeList:
    """Ordered set of blocks, initially all; doubly linked in fixed memory: an `OrderedDict` would be reallocated again and again."""

    def __init__(self, num_blocks: int):
        self._ends = num_blocks  # sentinel node before the first and after the last block
        self._next = array("i", [*range(1, num_blocks + 1), 0])  # -1: not in the list
        self._previous = array("i", [num_blocks, *range(num_blocks)])
        self._len = num_blocks

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block: int) -> bool:
        return self._next[block] >= 0

    def add(self, block: int, last: bool) -> None:
        before = self._previous[self._ends] if last else self._ends
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._next[block], self._previous[block] = after, before
        self._len += 1

    def remove(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._next[block] = -1
        self._len -= 1

    def pop_first(self) -> int:
        block = self._next[self._ends]
        self.remove(block)
        return block


class BlockPool:
    """Ref-counted KV blocks with a hash directory. The contents are in the workers.

    Invariant: a block is in the free list exactly if its count is 0, and hash <-> block is one to one.
    """

    def __init__(self, num_blocks: int, block_size: int, snapshot_share: float = 1.0):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._max_snapshot_blocks = int(snapshot_share * num_blocks)
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._snapshots: dict[bytes, list[int]] = {}
        self._snapshot_names: dict[int, bytes] = {}  # block -> name of its snapshot
        self._free = FreeList(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of a hash chain without acquiring them."""
        blocks = []
        for digest in hashes:
            block = self._cached.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def snapshot(self, digest: bytes) -> list[int]:
        """Return the blocks with the states after the named block and mark them as most recently used; empty if there are none."""
        blocks = self._snapshots.pop(digest, [])
        if blocks:
            self._snapshots[digest] = blocks
        self.acquire(blocks)
        self.release(blocks)
        return blocks

    def commit_snapshot(self, blocks: list[int], digest: bytes) -> None:
        """Name the states in held blocks, unless the name is taken, and release them. If snapshots exceed their share of the pool, the
        least recently used ones are evicted."""
        if digest not in self._snapshots:
            self._snapshots[digest] = blocks
            self._snapshot_names |= dict.fromkeys(blocks, digest)
        self.release(blocks)
        while len(self._snapshot_names) > self._max_snapshot_blocks:
            self._forget(next(iter(self._snapshots.values()))[0])

    def num_unheld(self, blocks: Iterable[int]) -> int:
        return sum(self._refs[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._refs[block] == 0:
                self._free.remove(block)
            self._refs[block] += 1

    def alloc(self, count: int) -> list[int] | None:
        """Allocate `count` blank blocks, evicting the least recently used; None if there are not enough."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop_first()
            self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Release blocks; the end of a sequence is evicted before its beginning."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.add(block, last=self._hashes[block] is not None or block in self._snapshot_names)

    def commit(self, block: int, digest: bytes) -> None:
        """Name the content of a full, held block, unless the name is taken."""
        assert self._refs[block] > 0
        if self._hashes[block] is None and digest not in self._cached:
            self._hashes[block] = digest
            self._cached[digest] = block

    def forget_all(self) -> None:
        for block in [*self._cached.values(), *self._snapshot_names]:
            self._forget(block)

    def _forget(self, block: int) -> None:
        digest = self._hashes[block]
        if digest is not None:
            del self._cached[digest]
            self._hashes[block] = None
        if block in self._snapshot_names:
            for other in self._snapshots.pop(self._snapshot_names[block]):
                del self._snapshot_names[other]
                if other in self._free:  # not the block that was just allocated: blank blocks are allocated first
                    self._free.remove(other)
                    self._free.add(other, last=False)


class BlockHasher:
    """Hash chain of one sequence: link i names the content of block i and of all blocks before it.

    A link covers the parent link, the block's token ids and, for each image that begins in the block, its hash and start: equal
    placeholders of different images never alias. The chain begins with the request's namespace.
    """

    def __init__(self, block_size: int, images: Sequence[ImageSpan], namespace: tuple[str, bytes]):
        self.block_size = block_size
        self._images = images
        self.links: list[bytes] = []
        salt, key = namespace
        self._root = hashlib.blake2b(salt.encode(), digest_size=DIGEST_SIZE, person=b"kv-blocks", key=key).digest()

    def chain(self, token_ids: np.ndarray, num_links: int) -> Iterator[bytes]:
        """Return the first `num_links` links, hashing only the missing ones."""
        for i in range(num_links):
            if i == len(self.links):
                self.extend(token_ids[: min(num_links, max(1, 2 * i)) * self.block_size])
            yield self.links[i]

    def extend(self, token_ids: np.ndarray) -> None:
        """Add the links of all full blocks of `token_ids` (int32, from the first token)."""
        first, size = len(self.links), self.block_size
        end = len(token_ids) // size
        num_bytes = size * token_ids.itemsize
        parts = self._image_parts(first * size, end * size)
        ids = token_ids[first * size : end * size].tobytes()
        link = self.links[-1] if self.links else self._root
        for i in range(end - first):
            content = link + ids[i * num_bytes : (i + 1) * num_bytes]
            if first + i in parts:
                content += parts[first + i]
            link = hashlib.blake2b(content, digest_size=DIGEST_SIZE).digest()
            self.links.append(link)

    def _image_parts(self, start: int, end: int) -> dict[int, bytes]:
        parts: dict[int, bytes] = {}
        low = bisect.bisect_left(self._images, start, key=lambda image: image.start)
        high = bisect.bisect_left(self._images, end, key=lambda image: image.start)
        for image in self._images[low:high]:
            block, offset = divmod(image.start, self.block_size)
            parts[block] = parts.get(block, b"") + image.hash + offset.to_bytes(8, "little")
        return parts
