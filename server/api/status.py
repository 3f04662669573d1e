"""The small endpoints: what is served, whether it is well, and its numbers. Routed to by `server/http/app.py`."""

import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.config import VERSION
from server.api.generation import Service
from server.errors import RequestError

SECRETS = frozenset({"api_key"})


class Status:
    """Answers from what this process knows."""

    def __init__(self, service: Service, is_compiling: Callable[[], bool]):
        self._service = service
        self._is_compiling = is_compiling
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        pages = {
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/health": self.health,
            "/health/live": self.live,
            "/metrics": self.metrics,
            "/version": self.version,
            "/server_info": self.server_info,
            "/load": self.load,
            "/tokenizer_info": self.tokenizer_info,
        }
        commands = {"/reset_prefix_cache": self.reset_prefix_cache, "/flush_cache": self.flush_cache}
        routes = [Route(path, page, methods=["GET"]) for path, page in pages.items()]
        routes += [Route(path, command, methods=["POST"]) for path, command in commands.items()]
        return [*routes, Route("/ping", self.health, methods=["GET", "POST"])]

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._service.model_names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.model_names:
            raise RequestError(404, f"The model '{name[:100]}' does not exist.", "model", "model_not_found")
        return JSONResponse(self._card(name))

    async def health(self, request: Request) -> Response:
        """200 only while the engine makes progress: a wedged engine and one that still starts are 503."""
        client = self._service.client
        if client.healthy:
            return JSONResponse({"status": "ok"})
        starting = "compiling" if self._is_compiling() else "starting"
        return JSONResponse({"status": "stalled" if client.started else starting}, 503, {"Retry-After": "5"})

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._service.client.num_streams})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """As vLLM has it: no later request finds its beginning computed."""
        self._service.client.forget(images=False)
        return Response()

    async def flush_cache(self, request: Request) -> Response:
        """As SGLang has it: no later request finds anything, embeddings of images included."""
        self._service.client.forget(images=True)
        return Response("Cache flushed.\n", media_type="text/plain")

    async def server_info(self, request: Request) -> Response:
        """The settings, without secrets, and the latest numbers of the engine."""
        settings = {name: value for name, value in msgspec.structs.asdict(self._service.config).items() if name not in SECRETS}
        stats = msgspec.structs.asdict(self._service.client.stats)
        return JSONResponse({"version": VERSION, "model": self._service.model_names[0], "settings": settings, "stats": stats})

    async def tokenizer_info(self, request: Request) -> Response:
        """The tokenizer's settings as the checkpoint has them, and the chat template that is used."""
        checkpoint = self._service.checkpoint
        file = checkpoint.folder / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return JSONResponse({**settings, "vocab_size": checkpoint.vocab_size, "chat_template": checkpoint.chat_template})

    def _card(self, name: str) -> dict[str, Any]:
        limit = self._service.client.stats.max_model_len or self._service.max_model_len  # 0 before the engine is ready
        root = self._service.config.model
        return {"id": name, "object": "model", "created": self._created, "owned_by": "engine", "root": root, "max_model_len": limit}
