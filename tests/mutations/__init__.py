"""Faults that the tests must find: each entry breaks one line of production code.

`python -m tests.mutations` puts each fault into a copy of the tree and reports which level of tests finds it. The gate checks the
list: every text must occur exactly once in its file, so the list cannot go stale unnoticed.
"""

from dataclasses import dataclass

SCHEDULER = ("tests/unit/scheduler",)
WORKER = ("tests/unit/worker",)
POSITIONS = ("tests/unit/models/test_geometry.py", "tests/unit/models/test_parity.py")


@dataclass(frozen=True)
class Mutation:
    """`old`, which occurs once in `file`, becomes `new`. `tests` are the module's, `suite` marks the last suite that may find it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    suite: str = "e2e"


MUTATIONS = (
    # Images and positions: wrong answers without an error.
    Mutation(
        "images of one pass are swapped",
        "models/vision/encoder.py",
        "return [part.clone(memory_format=torch.contiguous_format) for part in parts]",
        "return [part.clone(memory_format=torch.contiguous_format) for part in parts[::-1]]",
        ("tests/unit/models/test_parity.py", "tests/unit/models/vision"),
    ),
    Mutation(
        "embeddings of a chunk are swapped",
        "engine/worker/rows.py",
        "    return tuple(slices)",
        "    return tuple(replace(item, embedding=other.embedding) for item, other in zip(slices, slices[::-1], strict=True))",
        WORKER,
    ),
    Mutation(
        "one embedding stands for all images of its size",
        "engine/worker/images.py",
        "self.tensors.update((encode.image_id, tensor) for",
        "self.tensors.update((encode.image_id, own[0] if own[0].shape == tensor.shape else tensor) for",
        WORKER,
    ),
    Mutation(
        "images count like words",
        "models/media/mrope.py",
        "np.indices((t, h, w)).reshape(3, -1) + position",
        "np.arange(position, position + t * h * w)",
        POSITIONS,
    ),
    Mutation(
        "height is exchanged for width",
        "models/media/mrope.py",
        "np.indices((t, h, w)).reshape(3, -1) + position",
        "np.indices((t, h, w)).reshape(3, -1)[[0, 2, 1]] + position",
        POSITIONS,
    ),
    Mutation(
        "text after an image is one position late", "models/media/mrope.py", "position += max(h, w)", "position += max(h, w) + 1", POSITIONS
    ),
    Mutation(
        "the answer is one position late",
        "models/media/mrope.py",
        "return positions, next_position - num_tokens",
        "return positions, next_position - num_tokens + 1",
        POSITIONS,
    ),
    Mutation(
        "the answer ignores the positions of images",
        "models/media/mrope.py",
        "return positions, next_position - num_tokens",
        "return positions, 0",
        POSITIONS,
    ),
    Mutation(
        "an image's identity ignores its content",
        "server/processor/inspect.py",
        "        digest.update(data)\n        return",
        "        return",
        ("tests/unit/server/test_image.py",),
    ),
    Mutation(
        "an image's identity ignores the processing parameters",
        "server/processor/inspect.py",
        'b"jpeg" if stays_encoded else b"rgb", self._parameters',
        'b"jpeg" if stays_encoded else b"rgb",',
        ("tests/unit/server/test_image.py",),
    ),
    Mutation(
        "block hashes ignore images",
        "engine/scheduler/blocks.py",
        'parts.get(block, b"") + image.hash + offset',
        'parts.get(block, b"") + offset',
        SCHEDULER,
    ),
    Mutation(
        "block hashes ignore the salt",
        "engine/scheduler/blocks.py",
        "hashlib.blake2b(salt.encode(), digest_size",
        'hashlib.blake2b(b"", digest_size',
        SCHEDULER,
    ),
    Mutation(
        "rows of an image are one early",
        "engine/worker/rows.py",
        "ref.length, ref.offset, images[ref.image_id]",
        "ref.length, max(0, ref.offset - 1), images[ref.image_id]",
        WORKER,
    ),
    Mutation(
        "ids of later chunks are one early",
        "engine/worker/rows.py",
        "ids.append(row.known_ids[chunk.start : end])",
        "ids.append(row.known_ids[chunk.start - bool(chunk.start) : end - bool(chunk.start)])",
        WORKER,
    ),
    Mutation(
        "positions of later chunks are one late",
        "engine/worker/rows.py",
        "positions.append(row.prompt_positions[:, chunk.start : min(end, num_prompt)])",
        "positions.append(row.prompt_positions[:, chunk.start : min(end, num_prompt)] + bool(chunk.start))",
        WORKER,
    ),
    Mutation(
        "the last page is read one token short",
        "engine/worker/rows.py",
        "kv_lens_cpu=torch.from_numpy(kv_lens.astype(np.int32))",
        "kv_lens_cpu=torch.from_numpy((kv_lens - (kv_lens > 1)).astype(np.int32))",
        WORKER,
    ),
    # Scheduler and blocks.
    Mutation(
        "a released block stays held",
        "engine/scheduler/blocks.py",
        "            if self._refs[block] == 0:\n                self._free.add(block, last=",
        "            if self._refs[block] == 1:\n                self._free.add(block, last=",
        SCHEDULER,
    ),
    Mutation(
        "a reused block keeps its name",
        "engine/scheduler/blocks.py",
        "            block = self._free.pop_first()\n            self._forget(block)",
        "            block = self._free.pop_first()",
        SCHEDULER,
    ),
    Mutation(
        "the oldest request is preempted",
        "engine/scheduler/policy.py",
        "victim = self.state.running[-1]",
        "victim = self.state.running[0]",
        SCHEDULER,
    ),
    Mutation(
        "a whole prompt is taken from the cache",
        "engine/scheduler/policy.py",
        "usable = min(request.num_tokens - 1, len(ids))",
        "usable = min(request.num_tokens, len(ids))",
        SCHEDULER,
    ),
    Mutation(
        "an image loses its pin one chunk early",
        "engine/scheduler/policy.py",
        "            if span.end <= end:\n                self.unpins",
        "            if span.start <= end:\n                self.unpins",
        SCHEDULER,
    ),
    Mutation(
        "images beyond the chunk are encoded",
        "engine/scheduler/policy.py",
        "if images[i].start >= end), len(images)))",
        "if images[i].start > end + 64), len(images)))",
        SCHEDULER,
    ),
    Mutation(
        "evicted images are not named in plans",
        "engine/scheduler/images.py",
        "        self._evicted_ids.append(entry.image_id)",
        "        pass",
        SCHEDULER,
    ),
    Mutation(
        "pinned images are evicted",
        "engine/scheduler/images.py",
        "            if entry.pins == 0:\n                victims",
        "            if entry.pins >= 0:\n                victims",
        SCHEDULER,
    ),
    Mutation(
        "pins outlive their request",
        "engine/scheduler/state.py",
        "        request.pins.clear()\n        self.blocks.release(request.blocks)",
        "        self.blocks.release(request.blocks)",
        SCHEDULER,
    ),
    Mutation("tokens after an end are kept", "engine/scheduler/state.py", "kept = drawn[: i + 1]", "kept = drawn", SCHEDULER),
    # Sampling and drafts.
    Mutation(
        "a refused draft is kept",
        "engine/worker/sampling/drafts.py",
        "yield range(first, first + count + 1)",
        "yield range(first, first + min(count + 2, 1 + len(drafts)))",
        WORKER,
    ),
    Mutation(
        "the device keeps one draft too many",
        "engine/worker/sampling/drafts.py",
        "is_kept = before == before[self.firsts_S]",
        "is_kept = before <= before[self.firsts_S] + 1",
        WORKER,
    ),
    Mutation(
        "random numbers ignore the position",
        "engine/worker/sampling/draws.py",
        "seeds * SEED_FACTOR + positions.astype(np.uint64) * POSITION_FACTOR",
        "seeds * SEED_FACTOR + 0 * positions.astype(np.uint64) * POSITION_FACTOR",
        WORKER,
    ),
    Mutation(
        "top_p keeps one token too many",
        "models/kernels/reference/sampling.py",
        "mass.cumsum(dim=-1) - mass < limit[:, None]",
        "mass.cumsum(dim=-1) - 2 * mass < limit[:, None]",
        WORKER,
    ),
    Mutation(
        "top_k keeps one token too many",
        "models/kernels/reference/sampling.py",
        "(top_k == 0) | (ranks < top_k)",
        "(top_k == 0) | (ranks <= top_k)",
        WORKER,
    ),
    Mutation(
        "the repetition penalty ignores negative logits",
        "models/kernels/reference/sampling.py",
        "torch.where(logits_AV > 0, logits_AV / repetition, logits_AV * repetition)",
        "logits_AV / repetition",
        WORKER,
    ),
    # Arena and scanner.
    Mutation(
        "a freed region is not merged with the previous one",
        "engine/arena.py",
        "self._free_ends[i - 1] == offset",
        "self._free_ends[i - 1] == offset - 1",
        ("tests/unit/engine/test_arena.py",),
    ),
    Mutation(
        "a region is one unit short",
        "engine/arena.py",
        "for start, end in ranges if end - start >= need), None)",
        "for start, end in ranges if end - start >= need - ALIGNMENT), None)",
        ("tests/unit/engine/test_arena.py",),
    ),
    Mutation(
        "an escaped quote ends a string",
        "server/http/scan.py",
        "            num_quotes -= unpaired.count(b'\\\\\"')\n",
        "",
        ("tests/unit/server/test_scan.py", "tests/unit/server/test_fuzz.py"),
    ),
    Mutation(
        "a payload forgets the bytes of its last piece",
        "server/http/scan.py",
        "(len(data) if end is None else end) - start",
        "(len(data) if end is None else end - 1) - start",
        ("tests/unit/server/test_scan.py", "tests/unit/server/test_fuzz.py"),
    ),
    Mutation(
        "a split opening is overlooked",
        "server/http/scan.py",
        "end = len(data) - _overlap(data)",
        "end = len(data)",
        ("tests/unit/server/test_scan.py", "tests/unit/server/test_fuzz.py"),
    ),
    # Fetch and limits.
    Mutation(
        "private addresses are fetched",
        "server/processor/fetch.py",
        "if self._allow_private or is_public(",
        "if True or is_public(",
        ("tests/unit/server/test_fetch.py",),
    ),
    Mutation(
        "redirects are not checked",
        "server/processor/fetch.py",
        "target = self._check(target.join(parse_url(location)))",
        "target = target.join(parse_url(location))",
        ("tests/unit/server/test_fetch.py",),
    ),
    Mutation(
        "a download has no limit",
        "server/processor/fetch.py",
        "            if num_bytes > max_bytes:\n                raise too_large(max_bytes)\n            if num_bytes <",
        "            if num_bytes <",
        ("tests/unit/server/test_fetch.py",),
    ),
    Mutation(
        "a closed connection stays counted",
        "server/http/connection.py",
        "        self._open.discard(connection)\n",
        "",
        ("tests/unit/server/test_connections.py", "tests/unit/server/test_listeners.py"),
    ),
)
