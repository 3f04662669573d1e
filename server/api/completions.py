"""`POST /v1/completions`: text or token ids in, one or several at once, text out. Routed to by `server/http/app.py`."""

from typing import Any

import msgspec

from engine.messages import Submit, TextPrompt, TokenPrompt
from server.api.generation import GenerationEndpoint, Job, output_options, sampling_params, stages_of
from server.api.grammar import read_grammar
from server.api.schema import CompletionRequest
from server.http.body import Body
from server.http.sse import CompletionFormat


class CompletionEndpoint(GenerationEndpoint):
    """No chat template, no images; `n` choices a prompt."""

    format = CompletionFormat

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request = self.check(CompletionRequest, value)
        params = sampling_params(request, self.service.checkpoint.sampling)
        if request.echo:
            params = msgspec.structs.replace(params, prompt_logprobs=request.logprobs)
        grammar, grammar_field = read_grammar(request)
        rids = [body.rid, *(self.service.client.new_rid() for _ in request.prompts[1:])]
        submits = [
            Submit(
                rid=rid,
                prompt=TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt),
                media=[],
                params=params,
                output=output_options(request, echo=bool(request.echo)),
                stages=stages_of(body),
                cache_salt=request.cache_salt or "",
                n=request.n or 1,
                priority=request.priority or 0,
                grammar=grammar,
                grammar_field=grammar_field,
                prompt_field="prompt",
            )
            for rid, prompt in zip(rids, request.prompts, strict=True)
        ]
        return Job(request, submits)
