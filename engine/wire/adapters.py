"""LoRA adapters in messages."""

import hashlib

import msgspec


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
    """Return the number; 0 without an adapter."""
    return 0 if adapter is None else adapter.number


def image_key(digest: bytes, adapter: AdapterRef) -> bytes:
    return hashlib.blake2b(digest, digest_size=len(digest), key=b"%d" % adapter.number, person=b"image-of-adapter").digest()
