"""`POST /v1/chat/completions` in the api process: body, schema, Submit, reply. Routed to by `server/http/app.py`."""

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from engine.arena import Arena
from engine.config import EngineConfig
from engine.messages import API_ARENA, MediaRef, Region, SamplingParams, Stages, Submit
from server.checkpoint import SamplingDefaults
from server.errors import RequestError, overloaded
from server.http.body import Body, check_text_bytes, read_body
from server.http.client import Client
from server.http.direct import direct_reader
from server.http.metrics import Metrics
from server.http.reply import Reply, ReplyOptions
from server.http.scan import Scanner
from server.http.schema import ChatRequest, ImagePart, Message, TextPart, UnknownFields, parse_chat_request

URL_SCHEMES = ("http://", "https://", "file://", "data:")
LARGE_JSON_BYTES = 1 << 16  # from here on parsing leaves the event loop


@dataclass(slots=True)
class Conversation:
    """The messages in the processor's terms, and the media that they name."""

    messages: list[dict[str, object]]
    media: list[MediaRef]
    used_references: set[int]


class ChatEndpoint:
    """Turns requests into streams of the engine. One per process."""

    def __init__(self, config: EngineConfig, model_name: str, defaults: SamplingDefaults, arena: Arena, client: Client, metrics: Metrics):
        self._config = config
        self._model_name = model_name
        self._defaults = defaults
        self._arena = arena
        self._client = client
        self._metrics = metrics
        self._unknown = UnknownFields()
        self.num_reading = 0  # bodies that this process holds before the engine does

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: reads, submits and replies; the headers wait for the first event, so that a late reject is still a clean status."""
        reply = await self._accept(Request(scope, receive))
        await reply(scope, receive, send)

    async def _accept(self, request: Request) -> Reply:
        if not self._client.started:
            raise overloaded("The engine is still starting.", retry_after=5)
        header = request.headers.get("content-length")
        length = int(header) if header else None
        self.num_reading += 1
        try:
            body = await read_body(request.receive, length, direct_reader(request.scope), self._arena, self._config, self._client)
            return await self._submit(body)
        except asyncio.CancelledError:  # the server stops, and the rest of this body did not come in time
            self._client.check_open()
            raise
        finally:
            self.num_reading -= 1

    async def _submit(self, body: Body) -> Reply:
        with contextlib.ExitStack() as undo:
            undo.callback(body.give_up)
            request, conversation = await self._parse(body)
            message = self._message(request, conversation, body)
            stream = self._client.submit(message)
            if message.body is not None:
                undo.pop_all()  # from now on it is the processor that releases the body
        return Reply(stream, self._client, self._metrics, self._reply_options(request, body))

    def _message(self, request: ChatRequest, conversation: Conversation, body: Body) -> Submit:
        return Submit(
            rid=body.rid,
            messages=msgspec.json.encode(conversation.messages),
            media=conversation.media,
            params=sampling_params(request, self._defaults),
            stop=request.stop,
            stages=Stages(received=body.received),
            body=body.region.offset if conversation.used_references or body.num_announced else None,
            template_kwargs={**(request.chat_template_kwargs or {})},
            cache_salt=request.cache_salt or "",
        )

    def _reply_options(self, request: ChatRequest, body: Body) -> ReplyOptions:
        options = request.stream_options
        return ReplyOptions(
            model=self._model_name,
            completion_id=f"chatcmpl-{secrets.token_hex(16)}",
            created=int(time.time()),
            started=body.started,
            received=body.received,
            is_streamed=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            timings=bool(request.timings),
        )

    async def _parse(self, body: Body) -> tuple[ChatRequest, Conversation]:
        """Validates; a reference that stands anywhere but in a URL field is turned back into its text first."""
        scanner = body.scanner
        request, conversation = await self._read(scanner.json(body.payloads), body)
        used = conversation.used_references
        if len(used) < len(scanner.references):
            check_text_bytes(scanner.num_text_bytes + sum(ref.length for i, ref in enumerate(scanner.references) if i not in used))
            request, conversation = await self._read(scanner.json(body.payloads, keep=used), body)
        if request.model not in (None, "", self._model_name):
            raise RequestError(404, f"The model '{str(request.model)[:100]}' does not exist.", "model", "model_not_found")
        if len(conversation.media) > self._config.max_images_per_request:
            limit = self._config.max_images_per_request
            raise RequestError(400, f"The request holds {len(conversation.media)} images, the limit is {limit}.", "messages")
        return request, conversation

    async def _read(self, data: bytes, body: Body) -> tuple[ChatRequest, Conversation]:
        def job() -> tuple[ChatRequest, Conversation]:
            request = parse_chat_request(data, self._unknown)
            return request, read_conversation(request.messages, body.scanner, body.region.offset)

        return await asyncio.to_thread(job) if len(data) > LARGE_JSON_BYTES else job()


def sampling_params(request: ChatRequest, defaults: SamplingDefaults) -> SamplingParams:
    """What the request says, else what the checkpoint recommends; a request without a seed gets a random one."""
    top_k = request.top_k if request.top_k is not None else defaults.top_k
    return SamplingParams(
        max_tokens=request.token_limit,
        temperature=request.temperature if request.temperature is not None else defaults.temperature,
        top_p=request.top_p if request.top_p is not None else defaults.top_p,
        top_k=max(0, top_k),
        min_p=request.min_p or 0.0,
        seed=request.seed if request.seed is not None else secrets.randbits(63),
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
    )


def read_conversation(messages: list[Message], scanner: Scanner, body_offset: int) -> Conversation:
    """Replaces every image part by an index into the media. RequestError 400 for a URL that no loader knows."""
    conversation = Conversation([], [], set())
    for i, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        content: object = message.content or ""
        if isinstance(message.content, list):
            names = (f"messages.{i}.content.{j}" for j in range(len(message.content)))
            parts = zip(message.content, names, strict=True)
            content = [_read_part(part, name, scanner, body_offset, conversation) for part, name in parts]
        entry: dict[str, object] = {"role": role, "content": content}
        reasoning = message.reasoning_content or message.reasoning
        if reasoning is not None:
            entry["reasoning_content"] = reasoning
        conversation.messages.append(entry)
    return conversation


def _read_part(part: TextPart | ImagePart, name: str, scanner: Scanner, body_offset: int, conversation: Conversation) -> dict[str, object]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    url = part.image_url.url
    index = scanner.index_of(url)
    if index is not None:
        reference = scanner.references[index]
        conversation.used_references.add(index)
        payload = Region(API_ARENA, body_offset + reference.offset, reference.length)
        conversation.media.append(MediaRef(payload))
    elif url.lower().startswith(URL_SCHEMES):
        conversation.media.append(MediaRef(url=url))
    else:
        param = f"{name}.image_url.url"
        raise RequestError(400, f"{param}: expected a data:, http://, https:// or file:// URL.", param, "invalid_value")
    return {"type": "image", "media": len(conversation.media) - 1}
