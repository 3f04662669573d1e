"""Small endpoints: served models, health and metrics."""

import json
import time
from typing import Any, Literal

import msgspec
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from engine.wire.config import VERSION
from engine.wire.messages import Forget
from server.api.chat.endpoint import Service
from server.api.chat.routes import DescribedRoute

SECRETS = frozenset({"api_key"})


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    parent: str | None = None  # for an adapter: the base model


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok", "stopping", "stalled", "starting"]


class StatusRoutes:
    def __init__(self, service: Service):
        self._service = service
        self._created = int(time.time())

    def routes(self) -> list[DescribedRoute]:
        stalled = {503: {"model": Health}}
        return [
            DescribedRoute("/v1/models", self.models),
            DescribedRoute("/v1/models/", self.models, include_in_schema=False),
            DescribedRoute("/v1/models/{name:path}", self.model),
            DescribedRoute("/health", self.health, responses=stalled),
            DescribedRoute("/health_generate", self.health, responses=stalled),
            DescribedRoute("/health/live", self.live),
            DescribedRoute("/ping", self.health, responses=stalled),
            DescribedRoute("/ping", self.health, "POST", responses=stalled),
            DescribedRoute("/metrics", self.metrics, response_class=PlainTextResponse),
            DescribedRoute("/version", self.version),
            DescribedRoute("/server_info", self.server_info),
            DescribedRoute("/load", self.load),
            DescribedRoute("/tokenizer_info", self.tokenizer_info),
            DescribedRoute("/reset_prefix_cache", self.reset_prefix_cache, "POST", response_class=Response),
            DescribedRoute("/flush_cache", self.flush_cache, "POST", response_class=PlainTextResponse),
        ]

    async def models(self) -> ModelList:
        """The models that are served."""
        return ModelList(object="list", data=[self._card(name) for name in self._service.names])

    async def model(self, name: str) -> ModelCard:
        """One of the served models."""
        self._service.choose(name)
        return self._card(name)

    async def health(self, response: Response) -> Health:
        """200 only while the engine makes progress; 503 while it starts, stops or is stalled."""
        state = self._service.registry.health.state
        if state != "ok":
            response.status_code, response.headers["Retry-After"] = 503, "5"
        return Health(status=state)

    async def live(self) -> Health:
        """200 while the server process runs."""
        return Health(status="ok")

    async def version(self) -> dict[str, str]:
        """The version of the server."""
        return {"version": VERSION}

    async def metrics(self) -> Response:
        """Metrics for Prometheus."""
        return Response(self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def load(self) -> dict[str, int]:
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

    async def server_info(self) -> dict[str, Any]:
        """The settings, without secrets, and the latest numbers of the engine."""
        settings = {name: value for name, value in msgspec.structs.asdict(self._service.config).items() if name not in SECRETS}
        stats = msgspec.to_builtins(self._service.registry.stats)
        return {"version": VERSION, "model": self._service.model_names[0], "settings": settings, "stats": stats}

    async def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer's settings as the checkpoint has them, and the chat template that is used."""
        checkpoint = self._service.checkpoint
        file = checkpoint.folder / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return {**settings, "vocab_size": checkpoint.model.text.vocab_size, "chat_template": checkpoint.chat_template}

    def _card(self, name: str) -> ModelCard:
        service, is_adapter = self._service, name in self._service.adapters
        return ModelCard(
            id=name, object="model", created=self._created, owned_by="engine", root=name if is_adapter else service.config.model,
            max_model_len=service.registry.stats.max_model_len or service.max_model_len,  # 0 before the engine is ready
            parent=service.model_names[0] if is_adapter else None,
        )  # fmt: skip
