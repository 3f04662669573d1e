"""`POST /tokenize` and `POST /detokenize`: what a request would be to the model, images included. Routed to by `server/http/app.py`."""

from typing import Any

from starlette.responses import JSONResponse, Response

from engine.messages import (
    Event,
    Submit,
    TextPrompt,
    TokenPrompt,
)
from engine.params import OutputOptions, SamplingParams
from server.api.chat import chat_prompt, source_of
from server.api.conversation import read_conversation
from server.api.generation import GatheringEndpoint, Job, stages_of
from server.api.grammar import read_grammar
from server.api.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from server.http.body import Body


class TokenizeEndpoint(GatheringEndpoint):
    """Token ids of messages, as chat completions would make them, or of a prompt."""

    def read(self, value: dict[str, Any], body: Body) -> Job:
        if "messages" not in value:
            request = self.check(TokenizeRequest, value)
            read_grammar(request)  # for what is wrong with it
            return Job(request, [counted(body, TextPrompt(request.prompt), "prompt")])
        return counted_chat(self.check(ChatRequest, value), body)

    def answer(self, job: Job, events: list[Event]) -> Response:
        ids, limit = events[0].prompt_ids, self.service.client.stats.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})


class DetokenizeEndpoint(GatheringEndpoint):
    """The text of token ids, special ones included."""

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request = self.check(DetokenizeRequest, value)
        read_grammar(request)
        return Job(request, [counted(body, TokenPrompt(request.tokens), "tokens")])

    def answer(self, job: Job, events: list[Event]) -> Response:
        return JSONResponse({"prompt": events[0].text})


def counted(body: Body, prompt: Any, field: str) -> Submit:
    """A request that goes no further than the processor; `field` holds its prompt."""
    output = OutputOptions(echo=True)
    return Submit(body.rid, prompt, [], SamplingParams(), output, stages_of(body), is_counted_only=True, prompt_field=field)


def counted_chat(chat: ChatRequest, body: Body) -> Job:
    """The same, of messages and their images."""
    read_grammar(chat)
    conversation = read_conversation(chat.messages, source_of(chat, body), chat.mm_processor_kwargs)
    submit = counted(body, chat_prompt(chat, conversation.messages), "messages")
    submit.media = conversation.media
    return Job(chat, [submit], conversation.used_references)
