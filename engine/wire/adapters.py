"""LoRA adapters: their messages, and --lora-modules, whose folders are checked before any process starts."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from models.config.types import ModelConfig
from models.lora.adapter import read_adapter


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """Adapter of a request. `number` is positive and unique, even if an adapter of the same name is loaded again."""

    number: int
    name: str
    folder: str
    has_tower: bool  # whether it changes embeddings of images


class ReadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Order to read an adapter to host memory while steps go on; a plan loads it when all ranks have read it."""

    adapter: AdapterRef


class AdapterRead(msgspec.Struct, tag=True, frozen=True):
    """A rank's answer to `ReadAdapter`."""

    number: int
    is_readable: bool


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True):
    """Order to write an adapter to a slot of the device, replacing the previous one."""

    slot: int
    adapter: AdapterRef


def number_of(adapter: AdapterRef | None) -> int:
    return 0 if adapter is None else adapter.number


def image_key(digest: bytes, adapter: AdapterRef) -> bytes:
    return hashlib.blake2b(digest, digest_size=len(digest), key=b"%d" % adapter.number, person=b"image-of-adapter").digest()


def named_adapters(text: str, max_rank: int, model: ModelConfig, served: Sequence[str]) -> tuple[AdapterRef, ...]:
    """Return the adapters of --lora-modules. ValueError names the one that cannot be served, and why."""
    found: list[AdapterRef] = []
    for word in text.split():
        name, _, folder = word.partition("=")
        if not name or not folder:
            raise ValueError(f"--lora-modules {word}: must be name=folder")
        if name in served or any(name == other.name for other in found):
            raise ValueError(f"--lora-modules {name}: the name is already used")
        found.append(checked(name, Path(folder), max_rank, model, f"--lora-modules {name}", len(found) + 1))
    return tuple(found)


def checked(name: str, folder: Path, max_rank: int, model: ModelConfig, words: str, number: int) -> AdapterRef:
    """Return the adapter of a folder. ValueError, which begins with `words`, if it cannot be served."""
    try:
        adapter = read_adapter(folder, model, max_rank)
    except OSError as problem:
        raise ValueError(f"{words}: a file cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise ValueError(f"{words}: {problem}") from None
    return AdapterRef(number, name, str(folder.absolute()), adapter.has_tower)
