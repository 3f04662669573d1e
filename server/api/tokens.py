"""`POST /tokenize` and `POST /detokenize`: what a request would be to the model, images included. Routed to by `server/http/app.py`."""

from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.messages import (
    Event,
    Submit,
    TextPrompt,
    TokenPrompt,
)
from engine.params import OutputOptions, SamplingParams
from server.api.chat import chat_prompt, source_of
from server.api.conversation import read_conversation
from server.api.generation import Endpoint, Job, Service, stages_of
from server.api.grammar import read_grammar
from server.api.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from server.http.body import Body
from server.http.client import Stream
from server.http.reply import error_response


class CountReply:
    """An ASGI response, run once: the one event of a request that is only counted, as the JSON that `show` makes of it."""

    def __init__(self, stream: Stream, service: Service, show: Callable[[Event], dict[str, object]]):
        self._stream = stream
        self._service = service
        self._show = show

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            event = (await self._stream.next())[0]
        finally:
            self._service.client.close(self._stream)
        if event.error is not None:
            await error_response(event.error, scope)(scope, receive, send)
        else:
            await JSONResponse(self._show(event))(scope, receive, send)


class TokenizeEndpoint(Endpoint):
    """Token ids of messages, as chat completions would make them, or of a prompt."""

    def read(self, value: dict[str, Any], body: Body) -> Job:
        if "messages" not in value:
            request = self.check(TokenizeRequest, value)
            read_grammar(request)  # for what is wrong with it
            return Job(request, [counted(body, TextPrompt(request.prompt))])
        return counted_chat(self.check(ChatRequest, value), body)

    def reply(self, stream: Stream, job: Job, body: Body) -> ASGIApp:
        return CountReply(stream, self.service, self._show)

    def _show(self, event: Event) -> dict[str, object]:
        limit = self.service.client.stats.max_model_len
        return {"count": len(event.prompt_ids), "max_model_len": limit, "tokens": event.prompt_ids, "token_strs": None}


class DetokenizeEndpoint(Endpoint):
    """The text of token ids, special ones included."""

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request = self.check(DetokenizeRequest, value)
        read_grammar(request)
        return Job(request, [counted(body, TokenPrompt(request.tokens))])

    def reply(self, stream: Stream, job: Job, body: Body) -> ASGIApp:
        return CountReply(stream, self.service, lambda event: {"prompt": event.text})


def counted(body: Body, prompt: Any) -> Submit:
    """A request that goes no further than the processor."""
    return Submit(body.rid, prompt, [], SamplingParams(), OutputOptions(echo=True), stages_of(body), is_counted_only=True)


def counted_chat(chat: ChatRequest, body: Body) -> Job:
    """The same, of messages and their images."""
    read_grammar(chat)
    conversation = read_conversation(chat.messages, source_of(chat, body), chat.mm_processor_kwargs)
    submit = counted(body, chat_prompt(chat, conversation.messages))
    submit.media = conversation.media
    return Job(chat, [submit], conversation.used_references)
