"""`POST /tokenize` and `POST /detokenize`: what a request would be to the model, images included. Routed to by `server/http/app.py`."""

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.messages import (
    Submit,
    TextPrompt,
    TokenPrompt,
)
from engine.params import OutputOptions, SamplingParams
from server.api.chat import chat_prompt
from server.api.conversation import read_conversation
from server.api.generation import Endpoint, Job, Service, stages_of
from server.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest
from server.http.body import Body
from server.http.client import Stream
from server.http.reply import error_response
from server.http.validate import bad_value


class CountReply:
    """An ASGI response, run once: the one event of a request that is only counted, as JSON."""

    def __init__(self, stream: Stream, service: Service, is_text_wanted: bool):
        self._stream = stream
        self._service = service
        self._is_text_wanted = is_text_wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            event = (await self._stream.next())[0]
        finally:
            self._service.client.close(self._stream)
        if event.error is not None:
            await error_response(event.error)(scope, receive, send)
        elif self._is_text_wanted:
            await JSONResponse({"prompt": event.text})(scope, receive, send)
        else:
            ids, limit = event.prompt_ids, self._service.client.stats.max_model_len
            await JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})(scope, receive, send)


class TokenizeEndpoint(Endpoint):
    """Token ids of messages, as chat completions would make them, or of a prompt."""

    def read(self, value: dict[str, Any], body: Body) -> Job:
        if "messages" not in value:
            request = self.check(CompletionRequest, value)
            if len(request.prompts) > 1 or not isinstance(request.prompts[0], str):
                raise bad_value("prompt", "must be one text")
            return Job(request, [counted(body, TextPrompt(request.prompts[0]))])
        chat = self.check(ChatRequest, value)
        conversation = read_conversation(chat.messages, body.scanner, body.region.offset, chat.mm_processor_kwargs)
        submit = counted(body, chat_prompt(chat, conversation.messages))
        submit.media = conversation.media
        return Job(chat, [submit], conversation.used_references)

    def reply(self, stream: Stream, job: Job, body: Body) -> ASGIApp:
        return CountReply(stream, self.service, is_text_wanted=False)


class DetokenizeEndpoint(Endpoint):
    """The text of token ids, special ones included."""

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request = self.check(DetokenizeRequest, value)
        return Job(request, [counted(body, TokenPrompt(request.tokens))])

    def reply(self, stream: Stream, job: Job, body: Body) -> ASGIApp:
        return CountReply(stream, self.service, is_text_wanted=True)


def counted(body: Body, prompt: Any) -> Submit:
    """A request that goes no further than the processor."""
    return Submit(body.rid, prompt, [], SamplingParams(), OutputOptions(echo=True), stages_of(body), is_counted_only=True)
