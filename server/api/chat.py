"""`POST /v1/chat/completions`. Routed to by `server/http/app.py`."""

import hashlib
from typing import Any

import msgspec

from engine.messages import ChatPrompt, Submit
from server.api.conversation import Source, read_conversation
from server.api.generation import GenerationEndpoint, Job, output_options, sampling_params, stages_of
from server.api.grammar import check_strict_tools, read_grammar
from server.api.schema import ChatRequest, json_of
from server.http.body import Body
from server.http.sse import ChatFormat, Format


class ChatEndpoint(GenerationEndpoint):
    """Messages, images and tools."""

    format: type[Format] = ChatFormat
    prompt_field = "messages"

    def read(self, value: dict[str, Any], body: Body) -> Job:
        return self.job(self.check(ChatRequest, value), body)

    def job(self, request: ChatRequest, body: Body) -> Job:
        """What a checked request is to the processor. RequestError 400."""
        conversation = read_conversation(request.messages, source_of(request, body), request.mm_processor_kwargs)
        calls = "none" if not request.uses_tools else "one" if request.parallel_tool_calls is False else "all"
        must_call = request.uses_tools and request.tool_choice not in (None, "auto")
        grammar, grammar_field = read_grammar(request)
        check_strict_tools(request)
        submit = Submit(
            rid=body.rid,
            prompt=chat_prompt(request, conversation.messages),
            media=conversation.media,
            params=sampling_params(request, self.service.checkpoint.sampling),
            output=output_options(request, calls=calls, must_call=must_call, called=request.called),
            stages=stages_of(body),
            cache_salt=request.cache_salt or "",
            n=request.n or 1,
            priority=request.priority or 0,
            grammar=grammar,
            grammar_field=grammar_field or "tools",
            prompt_field=self.prompt_field,
        )
        return Job(request, [submit], conversation.used_references)


def source_of(request: ChatRequest, body: Body) -> Source:
    """Names of images are apart for each key that clients send, and for each salt."""
    owner = hashlib.sha256(body.credentials).digest() + hashlib.sha256((request.cache_salt or "").encode()).digest()
    return Source(body.scanner, body.region.offset, owner)


def chat_prompt(request: ChatRequest, messages: list[dict[str, object]]) -> ChatPrompt:
    return ChatPrompt(
        messages=msgspec.json.encode(messages),
        tools=json_of(request.tools or []) if request.uses_tools else None,
        template_kwargs=request.template_kwargs,
        ending="continue" if request.continue_final_message else "none" if request.add_generation_prompt is False else "generation",
    )
