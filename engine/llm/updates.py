"""Methods of `AsyncLLM` for weight updates."""

import asyncio
import contextlib
import os
from typing import Any, Protocol

import msgspec

from engine.wire.updates import Drain


class Poster(Protocol):
    async def post(self, path: str, body: dict[str, Any]) -> None: ...


async def pause_requests(self: Poster, mode: Drain = "abort") -> None:
    """Start no further requests until `resume`. Running ones end ("abort"), finish ("wait") or are continued later ("keep")."""
    await self.post("/pause", {"mode": mode})


async def resume_requests(self: Poster) -> None:
    await self.post("/resume", {})


async def replace_weights(self: Poster, source: Any, weight_version: str | None = None) -> None:
    """Replace weights by those of a checkpoint's folder, or by tensors (a mapping from names in checkpoints). Requests wait meanwhile.
    Needs the flag `enable_weight_updates`. Raises ValueError if names, shapes or formats differ; nothing has changed then."""
    version = {"weight_version": weight_version}
    if isinstance(source, str | os.PathLike):
        await self.post("/update_weights_from_disk", {"model_path": os.path.abspath(source), **version})
        return
    from engine.updates.memory import shared  # imports torch

    with contextlib.ExitStack() as stack:
        specs = await asyncio.to_thread(stack.enter_context, shared(source))
        tensors = [msgspec.to_builtins(spec) for spec in specs]
        await self.post("/update_weights_from_tensor", {"named_tensors": tensors, **version})
