"""Small endpoints: served models, health and metrics."""

import time
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response

from engine.wire.config import VERSION
from engine.wire.messages import Forget
from engine.wire.updates import FIRST_VERSION
from server.api.chat.endpoint import Service
from server.api.chat.routes import DescribedRoute

Json = dict[str, Any]
SECRETS = frozenset({"api_key"})


class StatusRoutes:
    def __init__(self, service: Service):
        self._service = service
        self._created = int(time.time())

    def routes(self) -> list[DescribedRoute]:
        return [
            DescribedRoute("/v1/models", self.models),
            DescribedRoute("/v1/models/{name:path}", self.model),
            *(DescribedRoute(path, self.health) for path in ("/health", "/health_generate", "/ping")),
            DescribedRoute("/ping", self.health, "POST"),
            DescribedRoute("/health/live", self.live),
            DescribedRoute("/metrics", self.metrics),
            DescribedRoute("/version", self.version),
            *(DescribedRoute(path, self.server_info) for path in ("/server_info", "/get_server_info")),
            *(DescribedRoute(path, self.model_info) for path in ("/model_info", "/get_model_info")),
            DescribedRoute("/load", self.load),
            DescribedRoute("/reset_prefix_cache", self.reset_prefix_cache, "POST"),
            DescribedRoute("/flush_cache", self.flush_cache, "POST"),
        ]

    async def models(self) -> Json:
        """The models that are served."""
        return {"object": "list", "data": [self._card(name) for name in self._service.names]}

    async def model(self, name: str) -> Json:
        """One of the served models."""
        self._service.choose(name)
        return self._card(name) if name else await self.models()

    async def health(self) -> Response:
        """200 only while the engine makes progress; 503 while it starts, stops or is stalled."""
        state = self._service.registry.health.state
        return JSONResponse({"status": state}) if state == "ok" else JSONResponse({"status": state}, 503, {"Retry-After": "5"})

    async def live(self) -> Json:
        """200 while the server process runs."""
        return {"status": "ok"}

    async def version(self) -> Json:
        """The version of the server."""
        return {"version": VERSION}

    async def metrics(self) -> Response:
        """Metrics for Prometheus."""
        return Response(self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def load(self) -> Json:
        """The number of choices that clients wait for."""
        return {"server_load": self._service.registry.num_streams}

    async def reset_prefix_cache(self) -> Response:
        """Empty the prefix cache, as vLLM's route does."""
        self._service.registry.send(Forget(images=False))
        return Response()

    async def flush_cache(self) -> Response:
        """Empty the prefix cache and the image cache, as other servers do."""
        self._service.registry.send(Forget(images=True))
        return Response("Cache flushed.\n", media_type="text/plain")

    async def model_info(self) -> Json:
        """The served model, in SGLang's form."""
        model, version = self._service.config.model, self._service.registry.weight_version or FIRST_VERSION
        can = {"is_generation": True, "has_image_understanding": True, "has_audio_understanding": False}
        return {"model_path": model, "tokenizer_path": model, "weight_version": version, "preferred_sampling_params": None, **can}

    async def server_info(self) -> Json:
        """The settings, without secrets, and the latest numbers of the engine."""
        config, stats = self._service.config, self._service.registry.stats
        settings = {name: value for name, value in msgspec.structs.asdict(config).items() if name not in SECRETS}
        return {"version": VERSION, **await self.model_info(), "settings": settings, "stats": msgspec.to_builtins(stats)}

    def _card(self, name: str) -> Json:
        service, is_adapter = self._service, name in self._service.adapters
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "engine",
            "root": name if is_adapter else service.config.model, "parent": service.model_names[0] if is_adapter else None,
            "max_model_len": service.registry.stats.max_model_len or service.max_model_len,  # 0 before the engine is ready
        }  # fmt: skip
