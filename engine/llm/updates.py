"""Weight updates by `AsyncLLM`."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any, Protocol

MEMORY = "/dev/shm"  # a file system in memory


class Poster(Protocol):
    async def post(self, path: str, body: dict[str, Any]) -> None: ...


async def replace_weights(self: Poster, source: Any, weight_version: str | None = None) -> None:
    """Replace all weights by those of a checkpoint's folder, or by tensors (a mapping from names in checkpoints), which are written to a
    private folder first. Requests wait meanwhile. Needs the flag `enable_weight_updates`. Raises ValueError if names, shapes or formats
    differ; nothing has changed then."""
    body = {"weight_version": weight_version}
    if isinstance(source, str | os.PathLike):
        await self.post("/update_weights_from_disk", {"model_path": os.path.abspath(source), **body})
        return
    num_bytes = sum(tensor.nbytes for tensor in source.values())
    has_space = os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > num_bytes
    with tempfile.TemporaryDirectory(prefix="weights-", dir=MEMORY if has_space else None) as folder:
        await asyncio.to_thread(_write, source, os.path.join(folder, "model.safetensors"))
        await self.post("/update_weights_from_disk", {"model_path": folder, **body})


def _write(tensors: Mapping[str, Any], path: str) -> None:
    from safetensors.torch import save_file  # imports torch

    written, storages = {}, set[int]()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        is_shared = value.untyped_storage().data_ptr() in storages  # tied tensors, which the format does not have
        storages.add(value.untyped_storage().data_ptr())
        written[name] = value.clone() if is_shared else value
    save_file(written, path)
