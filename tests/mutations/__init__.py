"""Faults that the tests must find: each entry breaks one line of production code.

`python -m tests.mutations` puts each into a copy of the tree and reports whether the tests of its module find it. The gate checks that
every text occurs once in its file.
"""

from dataclasses import dataclass

SCHEDULER = ("tests/unit/scheduler",)
WORKER = ("tests/unit/worker",)
POSITIONS = ("tests/unit/models/test_geometry.py", "tests/unit/models/test_parity.py")


@dataclass(frozen=True)
class Mutation:
    """`old`, which occurs once in `file`, becomes `new`. `tests` are those of the module."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


# By file and tests of its module: name -> old text, new text.
FAULTS: dict[tuple[str, tuple[str, ...]], dict[str, tuple[str, str]]] = {
    ("models/vision/encoder.py", ("tests/unit/models/test_parity.py", "tests/unit/models/vision")): {
        "images of one pass are swapped": (
            "return [part.clone(memory_format=torch.contiguous_format) for part in parts]",
            "return [part.clone(memory_format=torch.contiguous_format) for part in parts[::-1]]",
        ),
    },
    ("engine/worker/rows.py", WORKER): {
        "embeddings of a chunk are swapped": (
            "    return tuple(slices)",
            "    return tuple(replace(item, embedding=other.embedding) for item, other in zip(slices, slices[::-1], strict=True))",
        ),
        "ids of later chunks are one early": (
            "ids.append(row.known_ids[chunk.start : end])",
            "ids.append(row.known_ids[chunk.start - bool(chunk.start) : end - bool(chunk.start)])",
        ),
        "the last page is read one token short": (
            "kv_lens_cpu=torch.from_numpy(kv_lens.astype(np.int32))",
            "kv_lens_cpu=torch.from_numpy((kv_lens - (kv_lens > 1)).astype(np.int32))",
        ),
    },
    ("engine/worker/masks.py", WORKER): {
        "masks do not wait for drafts": ("            proposing.wait()\n", ""),
    },
    ("engine/worker/images.py", WORKER): {
        "one embedding stands for all images of its size": (
            "self.tensors.update((encode.image_id, tensor) for",
            "self.tensors.update((encode.image_id, own[0] if own[0].shape == tensor.shape else tensor) for",
        ),
    },
    ("models/media/mrope.py", POSITIONS): {
        "images count like words": ("np.indices((t, h, w)).reshape(3, -1) + position", "np.arange(position, position + t * h * w)"),
        "the answer is one position late": (
            "return positions, next_position - num_tokens",
            "return positions, next_position - num_tokens + 1",
        ),
    },
    ("server/processor/media/image.py", ("tests/unit/server/test_image.py",)): {
        "an image's identity ignores its content": ("sha256(self.file.digest + limits)", "sha256(limits)"),
        "an image's identity ignores the limits on its size": ("sha256(self.file.digest + limits)", "sha256(self.file.digest)"),
    },
    ("engine/scheduler/blocks.py", SCHEDULER): {
        "block hashes ignore images": ('parts.get(block, b"") + image.hash + offset', 'parts.get(block, b"") + offset'),
        "block hashes ignore the salt": ("hashlib.blake2b(salt.encode(), digest_size", 'hashlib.blake2b(b"", digest_size'),
        "a reused block keeps its name": (
            "            block = self._free.pop_first()\n            self._forget(block)",
            "            block = self._free.pop_first()",
        ),
    },
    ("engine/scheduler/policy.py", SCHEDULER): {
        "the oldest request is preempted": ("victim = self.state.running[-1]", "victim = self.state.running[0]"),
        "an image loses its pin one chunk early": (
            "            if span.end <= end:\n                self.unpins",
            "            if span.start <= end:\n                self.unpins",
        ),
    },
    ("engine/scheduler/images.py", SCHEDULER): {
        "pinned images are evicted": (
            "            if entry.pins == 0:\n                victims",
            "            if entry.pins >= 0:\n                victims",
        ),
    },
    ("engine/scheduler/state.py", SCHEDULER): {
        "pins outlive their request": (
            "        request.pins.clear()\n        self.blocks.release(request.blocks)",
            "        self.blocks.release(request.blocks)",
        ),
        "drafts outlive a preemption": (
            "request.proposed, request.num_proposed, request.is_held = (), 0, False",
            "request.proposed, request.is_held = (), False",
        ),
    },
    ("engine/worker/sampling/verify.py", WORKER): {
        "a refused token is kept": (
            "yield range(first, first + count - tokens[first : first + count].count(NONE))",
            "yield range(first, first + min(count, count + 1 - tokens[first : first + count].count(NONE)))",
        ),
    },
    ("engine/worker/sampling/samples.py", WORKER): {
        "random numbers ignore the position": (
            "seeds * SEED_FACTOR + positions.astype(np.uint64) * POSITION_FACTOR",
            "seeds * SEED_FACTOR + 0 * positions.astype(np.uint64) * POSITION_FACTOR",
        ),
    },
    ("models/kernels/reference/sampling.py", WORKER): {
        "top_p keeps one token too many": (
            "mass.cumsum(dim=-1) - mass < limit[:, None]",
            "mass.cumsum(dim=-1) - 2 * mass < limit[:, None]",
        ),
    },
    ("engine/wire/arena.py", ("tests/unit/engine/test_arena.py",)): {
        "a freed region is not merged with the previous one": ("self._free_ends[i - 1] == offset", "self._free_ends[i - 1] == offset - 1"),
    },
    ("server/api/http/scan.py", ("tests/unit/server/test_scan.py",)): {
        "an escaped quote ends a string": ("            num_quotes -= unpaired.count(b'\\\\\"')\n", ""),
        "a split opening is overlooked": ("end = len(data) - _overlap(data)", "end = len(data)"),
    },
    ("server/processor/media/fetch.py", ("tests/unit/server/test_fetch.py",)): {
        "private addresses are fetched": ("if not (self._allow_private or is_public(", "if not (True or is_public("),
        "a download has no limit": (
            "                    if num_left < 0:\n                        raise too_large(max_bytes)\n",
            "",
        ),
    },
    ("server/api/http/connection.py", ("tests/unit/server/test_connections.py",)): {
        "a refused body is read": ("            self._linger()\n        else:", "            pass\n        else:"),
    },
}
MUTATIONS = tuple(Mutation(name, file, old, new, tests) for (file, tests), faults in FAULTS.items() for name, (old, new) in faults.items())
