"""LoRA adapters under names of their own, and vLLM's routes that load and unload them while the server runs (`--lora-root`)."""

import asyncio
import itertools
import logging
from pathlib import Path

from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from engine.wire.adapters import AdapterRef, checked
from models.config.huggingface import read_config
from server.api.chat.endpoint import Service
from server.api.chat.routes import BodyRoute, Command, DescribedRoute, Run
from server.api.schema.validate import Strict, bad_value
from server.errors import RequestError

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 1024
FIRST_NUMBER = 1 << 20  # larger than the numbers of --lora-modules


class LoadRequest(Strict):
    lora_name: str = Field(min_length=1, max_length=256, pattern=r"^\P{C}+$")  # no control characters, which could forge a line of a log
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False  # replaces an adapter of this name


class UnloadRequest(Strict):
    lora_name: str = Field(min_length=1)


class AdapterRoutes:
    """Routes of adapters. New requests can use a loaded name at once; running requests keep their adapter."""

    def __init__(self, service: Service):
        self._service, self._numbers = service, itertools.count(FIRST_NUMBER)

    def routes(self) -> list[DescribedRoute]:
        commands: dict[str, Run] = {"/v1/load_lora_adapter": self.load, "/v1/unload_lora_adapter": self.unload}
        return [BodyRoute(path, Command(run)) for path, run in commands.items()]

    async def load(self, asked: LoadRequest) -> Response:
        """Serve the adapter of a folder below --lora-root under a new name."""
        adapters, name = self._service.adapters, asked.lora_name
        is_known = name in adapters
        if name in self._service.model_names or (is_known and not asked.load_inplace):
            raise bad_value("lora_name", f"'{name[:100]}' is served already")
        if not is_known and len(adapters) >= MAX_ADAPTERS:
            raise bad_value("lora_name", f"at most {MAX_ADAPTERS} adapters are served: unload one")
        adapter = adapters[name] = await asyncio.to_thread(self._read, name, asked.lora_path)
        logger.info("loaded the adapter %s from %r", name, adapter.folder)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, asked: UnloadRequest) -> Response:
        """Serve an adapter no longer."""
        if self._service.adapters.pop(asked.lora_name, None) is None:
            raise RequestError(404, f"The adapter '{asked.lora_name[:100]}' does not exist.", "lora_name", "model_not_found")
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    def _read(self, name: str, path: str) -> AdapterRef:
        config, folder = self._service.config, self._service.checkpoint.folder
        assert config.lora_root is not None
        root = Path(config.lora_root).resolve()
        try:
            found = (root / path).resolve()
            is_folder = found.is_dir()
            are_inside = all(file.resolve().is_relative_to(root) for file in (found, *found.glob("adapter_*")))  # files may be links
        except (OSError, ValueError):  # such as a loop of links, a zero byte, a name that is too long
            are_inside = False
        if not are_inside or found == root:
            raise bad_value("lora_path", "must be a folder below --lora-root, as must be its files")
        if not is_folder:
            raise RequestError(404, "lora_path: there is no such folder", "lora_path", "not_found")
        try:
            return checked(name, found, config.max_lora_rank, read_config(folder), "lora_path", next(self._numbers))
        except ValueError as problem:
            raise RequestError(400, str(problem), "lora_path", "invalid_value") from None


def adapter_routes(service: Service) -> list[DescribedRoute]:
    return AdapterRoutes(service).routes() if service.config.lora_root is not None else []
