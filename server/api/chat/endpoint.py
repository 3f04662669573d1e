"""Base of endpoints with a body: it is read, validated, submitted as one Submit per prompt, and answered."""

import asyncio
import contextlib
import dataclasses
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.wire.adapters import AdapterRef
from engine.wire.arena import Arena
from engine.wire.config import EngineConfig
from engine.wire.messages import Submit
from engine.wire.params import PARAMETERS, Prompt, SamplingParams
from engine.wire.stats import Stages
from models.config.types import SamplingDefaults
from server.api.http.body import Body, check_text_bytes, read_body
from server.api.http.metrics import Metrics
from server.api.http.middleware import keys_of
from server.api.http.registry import RequestRegistry
from server.api.http.reply import GeneratedReply, Reply
from server.api.http.streaming import MakeFormat, ReplyOptions
from server.api.schema.formats import read_grammar
from server.api.schema.requests import AnyRequest, GenerationRequest, StreamOptions
from server.api.schema.validate import check, read_object
from server.checkpoint import Checkpoint
from server.errors import RequestError

Checked = TypeVar("Checked", bound=AnyRequest)

MAX_NAMES = 20  # limit of model names in an error
LARGE_JSON_BYTES = 1 << 16  # larger bodies are parsed in a thread


@dataclass(frozen=True, slots=True)
class Service:
    config: EngineConfig
    checkpoint: Checkpoint
    model_names: tuple[str, ...]  # answers contain the first one
    max_model_len: int  # as configured; the engine reports the actual limit
    arena: Arena
    registry: RequestRegistry
    metrics: Metrics
    seeds: random.Random  # for requests without a seed
    adapters: dict[str, AdapterRef] = field(default_factory=dict)  # by the name that requests have as their `model`

    @property
    def names(self) -> list[str]:
        return [*self.model_names, *self.adapters]

    def choose(self, model: str | None, submits: Iterable[Submit] = ()) -> None:
        """Make these requests use what their `model` names: the model or an adapter. RequestError 404."""
        if not model or model in self.model_names:
            return
        if model not in self.adapters:
            raise unknown_model(model, self.names)
        for submit in submits:
            submit.adapter = self.adapters[model]


class Endpoint(ABC):
    """ASGI application of a route. Headers are sent with the first event, so that a late rejection still has an HTTP status.
    `/openapi.json` shows the docstrings of endpoints."""

    takes: Any  # type of the body

    def __init__(self, service: Service):
        self.service = service

    @abstractmethod
    def read(self, value: dict[str, Any], body: Body) -> Reply:
        """Return the reply to a body's JSON, with the Submits for it; may be called in any thread. RequestError."""

    def check(self, model: type[Checked], value: dict[str, Any]) -> Checked:
        request = check(model, value)
        request.check_together(self.service.checkpoint.model.text.vocab_size)
        return request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.service.registry.check_open()
        try:
            reply = await self._accept(Request(scope, receive))
        except asyncio.CancelledError:  # the server stops before the whole body has arrived
            self.service.registry.check_open()
            raise
        await reply(scope, receive, send)

    async def _accept(self, request: Request) -> Reply:
        service = self.service
        header = request.headers.get("content-length")
        length = int(header) if header else None
        body = await read_body(request.receive, length, arena=service.arena, config=service.config, registry=service.registry)
        body.credentials = b"\0".join(keys_of(request.scope))
        return await self._submit(body)

    async def _submit(self, body: Body) -> Reply:
        """Parse the body, pass it to the processor and return the response. After a RequestError the body has been released."""
        service = self.service
        with contextlib.ExitStack() as undo:
            undo.callback(body.give_up)
            body.seed = service.seeds.getrandbits(63)  # in the order of arrival: large bodies are read in threads
            data = body.scanner.json()
            reply = await asyncio.to_thread(self._read, data, body) if len(data) > LARGE_JSON_BYTES else self._read(data, body)
            service.choose(reply.request.model, reply.submits)
            limit = service.config.max_images_per_request
            if reply.num_images > limit:
                words = f"The request holds {reply.num_images} images, the limit is {limit}."
                raise RequestError(400, words, reply.submits[0].prompt_field)
            limits = [limit for limit in (reply.request.timeout, service.config.request_timeout) if limit is not None]
            is_needed = bool(body.scanner.used or body.num_announced)
            for submit in reply.submits:
                submit.deadline = body.received + min(limits) if limits else None
                submit.body = body.region.offset if is_needed else None  # released by the last one
            reply.begin(service.registry.submit(reply.submits), service.registry, service.metrics)
            if is_needed:
                undo.pop_all()  # from now on the processor releases the body
        return reply

    def _read(self, data: bytes, body: Body) -> Reply:
        """Return the reply. References outside URL fields are replaced by their text first."""
        value, scanner = read_object(data), body.scanner
        reply = self.read(value, body)
        if len(scanner.used) < len(scanner.references):
            unused = (reference for i, reference in enumerate(scanner.references) if i not in scanner.used)
            check_text_bytes(scanner.num_text_bytes + sum(reference.length for reference in unused))
            reply = self.read(scanner.restored(value, body.payloads), body)
        return reply


class GenerationEndpoint(Endpoint):
    def reply_to(
        self, request: GenerationRequest, body: Body, prompts: Sequence[Prompt], field: str, format: MakeFormat, **output: Any
    ) -> Reply:
        grammar, grammar_field = read_grammar(request)
        params = sampling_params(request, self.service.checkpoint.model.sampling, body.seed)
        rules = request.output_options(**output)
        submits = submits_of(
            body, prompts, field, params=params, output=rules, cache_salt=request.cache_salt or "", n=request.n or 1,
            grammar=grammar, grammar_field=grammar_field,
        )  # fmt: skip
        wanted = request.stream_options or StreamOptions()
        options = ReplyOptions(
            model=request.model or self.service.model_names[0], created=int(time.time()), started=body.started, received=body.received,
            is_streamed=bool(request.stream), timings=bool(request.timings),
            include_usage=bool(wanted.include_usage),
            continuous_usage=bool(wanted.include_usage and wanted.continuous_usage_stats), params=params,
            drops_empty=rules.calls != "none",
            hides_reasoning=request.include_reasoning is False,
        )  # fmt: skip
        return GeneratedReply(request, submits, format=format, options=options)


def unknown_model(name: str, served: Sequence[str]) -> RequestError:
    more = f" and {len(served) - MAX_NAMES} more" if len(served) > MAX_NAMES else ""
    words = f"The model '{name[:100]}' does not exist. This server has: {', '.join(served[:MAX_NAMES])}{more}."
    return RequestError(404, words, "model", "model_not_found")


def json_response(document: bytes) -> Response:
    return Response(document, media_type="application/json")


def sampling_params(request: GenerationRequest, defaults: SamplingDefaults, seed: int) -> SamplingParams:
    """Return the request's parameters, with the checkpoint's defaults; `seed` is used if the request has none."""
    values = {name: getattr(request, name) for name, parameter in PARAMETERS.items() if not parameter.is_text}
    values |= request.derived
    given = dataclasses.asdict(defaults) | {"seed": seed} | {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, list | dict):
            given[name] = tuple((int(key), one) for key, one in value.items()) if isinstance(value, dict) else tuple(value)
    return SamplingParams(**given | {"top_k": max(0, given["top_k"])})


def submits_of(body: Body, prompts: Sequence[Prompt], field: str, **others: Any) -> list[Submit]:
    """Return one Submit per prompt of this field; `others` are fields of `Submit`."""
    others |= {"prompt_field": field, "num_prompts": len(prompts)}
    rids = [body.rid, *(body.new_rid() for _ in prompts[1:])]
    return [Submit(rid, prompt, [], stages=Stages(body.received), **others) for rid, prompt in zip(rids, prompts, strict=True)]
