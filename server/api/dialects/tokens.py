"""`/tokenize` and `/detokenize`, and requests that only count tokens."""

from typing import Any

from starlette.responses import Response

from engine.wire.messages import Event
from engine.wire.params import OutputOptions, Prompt, SamplingParams
from server.api.chat.completions import chat_prompt, read_conversation
from server.api.chat.endpoint import Endpoint, json_response, submits_of
from server.api.http.body import Body
from server.api.http.reply import GatheredReply, Reply, Show
from server.api.http.streaming import encode
from server.api.schema.formats import read_grammar
from server.api.schema.requests import AnyIds, ChatRequest, GenerationRequest, check_ids


class TokenizeRequest(GenerationRequest):
    prompt: str


class DetokenizeRequest(GenerationRequest):
    tokens: AnyIds

    def check_together(self, vocab_size: int) -> None:
        super().check_together(vocab_size)
        check_ids([self.tokens], "tokens", vocab_size)


class TokenizeEndpoint(Endpoint):
    """Token ids of messages, as chat completions would make them, or of a text."""

    takes = ChatRequest | TokenizeRequest

    def read(self, value: dict[str, Any], body: Body) -> Reply:
        if "messages" in value:
            return counted_chat(self.check(ChatRequest, value), body, self._show)
        request = self.check(TokenizeRequest, value)
        return _counted(request, body, request.prompt, "prompt", self._show)

    def _show(self, events: list[Event]) -> Response:
        ids, limit = events[0].prompt_ids, self.service.registry.stats.max_model_len
        return json_response(encode({"count": len(ids), "tokens": ids, "max_model_len": limit, "token_strs": None}))


class DetokenizeEndpoint(Endpoint):
    """The text of token ids, special ones included."""

    takes = DetokenizeRequest

    def read(self, value: dict[str, Any], body: Body) -> Reply:
        request = self.check(DetokenizeRequest, value)
        return _counted(request, body, request.tokens, "tokens", self._show)

    @staticmethod
    def _show(events: list[Event]) -> Response:
        return json_response(encode({"prompt": events[0].text, "text": events[0].text}))


ROUTES: dict[str, type[Endpoint]] = {
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), TokenizeEndpoint),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), DetokenizeEndpoint),
}


def counted_chat(request: ChatRequest, body: Body, show: Show) -> Reply:
    """Return a reply that counts the tokens of messages with their images."""
    messages, media = read_conversation(request, request.messages, body)
    reply = _counted(request, body, chat_prompt(request, messages), "messages", show)
    reply.submits[0].media = media
    return reply


def _counted(request: GenerationRequest, body: Body, prompt: Prompt, field: str, show: Show) -> Reply:
    """Return a reply to a request that only counts tokens and ends in the processor; `field` contains the prompt. RequestError 400."""
    read_grammar(request)  # to report its errors
    submits = submits_of(body, [prompt], field, params=SamplingParams(), output=OutputOptions(echo=True), is_counted_only=True)
    return GatheredReply(request, submits, show)
