"""Serialisation of chat and text completions: chunks of a stream without `event:` lines, or one JSON document.

`token_chunk` is the hot path."""

import secrets
from abc import abstractmethod
from collections.abc import Iterable

import msgspec

from engine.wire.messages import CallDelta, ErrorInfo, Event, Logprob
from server.api.http.streaming import Call, Choice, Format, ReplyOptions, Scores, Usage, encode
from server.errors import error_body

DONE = b"data: [DONE]\n\n"
NO_REASONING = {"reasoning": None, "reasoning_content": None}
PLAIN = encode(NO_REASONING)[1:-1] + b',"content":'  # before the text of a delta


class OpenAIFormat(Format):
    id_prefix: str
    chunk_object: str
    document_object: str

    def __init__(self, options: ReplyOptions):
        self._head = {"id": f"{self.id_prefix}-{secrets.token_hex(16)}", "object": self.chunk_object, "created": options.created}
        self._head["model"] = options.model
        self._prefix = b"data: " + encode(self._head)[:-1]
        self._continuous_usage, self._include_usage = options.continuous_usage, options.include_usage
        self._plain_end = b',"finish_reason":null}]' + (b',"usage":null' if options.include_usage else b"") + b"}\n\n"
        self._openings: dict[int, bytes] = {}  # templates of token chunks, by choice

    @abstractmethod
    def document_choice(self, choice: Choice) -> dict[str, object]: ...

    def document_head(self, choice: Choice) -> dict[str, object]:
        """Return further members of a document; `choice` is its first one."""
        return {}

    def end(self, usage: Usage, timings: dict[str, object]) -> bytes:
        if not self._include_usage:
            return DONE
        return b"data: " + encode({**self._head, "choices": [], "usage": usage_json(usage), **timings}) + b"\n\n" + DONE

    def error_chunk(self, info: ErrorInfo) -> bytes:
        return b"data: " + error_body(info) + b"\n\n"

    def document(self, choices: list[Choice], usage: Usage, timings: dict[str, object]) -> bytes:
        entries = [{"index": choice.index, **self.document_choice(choice), **_ids(choice), **_ending(choice)} for choice in choices]
        head = {**self._head, "object": self.document_object, **self.document_head(choices[0])}
        return encode({**head, "choices": entries, "usage": usage_json(usage), **timings})

    def _end(self, choice: Choice, extra: dict[str, object]) -> bytes:
        if choice.finish_reason is None and not self._continuous_usage:
            return self._plain_end
        last = self._usage(choice) or extra
        return b"," + encode(_ending(choice))[1:-1] + b"}]" + (b"," + encode(last)[1:] if last else b"}") + b"\n\n"

    def _usage(self, choice: Choice) -> dict[str, object]:
        return {"usage": usage_json(choice.usage) if self._continuous_usage else None} if self._include_usage else {}

    def _opening(self, choice: Choice, rest: bytes) -> bytes:
        """Return the bytes before the text of a token, formatted once per choice."""
        opening = self._openings.get(choice.index)
        if opening is None:
            opening = self._openings[choice.index] = self._prefix + b',"choices":[{"index":%d,' % choice.index + rest
        return opening


class ChatFormat(OpenAIFormat):
    id_prefix, chunk_object, document_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(self, options: ReplyOptions):
        super().__init__(options)

    def first_chunk(self, choice: Choice) -> bytes:
        delta = {"role": "assistant", "content": "", **NO_REASONING}
        entry = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._head, "choices": [entry], **self._usage(choice), **_prompt_ids(choice)}
        return b"data: " + encode(chunk) + b"\n\n"

    def token_chunk(self, choice: Choice, event: Event, extra: dict[str, object]) -> bytes:
        value = encode(event.text)
        logprobs = encode(_token_list(event.logprobs)) if event.logprobs else b"null"
        delta = b'"reasoning":' + value + b',"reasoning_content":' + value if event.is_reasoning else PLAIN + value
        if event.calls:
            calls = encode([self._delta_json(choice, call) for call in event.calls])
            delta = (delta + b"," if event.text else b"") + b'"tool_calls":' + calls
        return self._opening(choice, b'"delta":{') + delta + b'},"logprobs":' + logprobs + _ids_json(event) + self._end(choice, extra)

    def document_head(self, choice: Choice) -> dict[str, object]:
        return _of_prompt(choice)

    def document_choice(self, choice: Choice) -> dict[str, object]:
        content = "".join(choice.content)
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None, **NO_REASONING}
        if choice.reasoning:
            reasoning = "".join(choice.reasoning)
            message |= {"content": content or None, "reasoning": reasoning, "reasoning_content": reasoning}
        if choice.calls:
            message |= {"content": content or None, "tool_calls": [_call_json(call, call.arguments) for call in choice.calls]}
        return {"message": message, "logprobs": _token_list(choice.logprobs) if choice.logprobs else None}

    def _delta_json(self, choice: Choice, delta: CallDelta) -> dict[str, object]:
        call = choice.calls[delta.index]
        piece = {"function": {"arguments": delta.arguments}} if delta.name is None else _call_json(call, delta.arguments)
        return {"index": delta.index, **piece}


class CompletionFormat(OpenAIFormat):
    id_prefix, chunk_object, document_object = "cmpl", "text_completion", "text_completion"

    def first_chunk(self, choice: Choice) -> bytes:
        return b""

    def token_chunk(self, choice: Choice, event: Event, extra: dict[str, object]) -> bytes:
        logprobs = encode(_completion_logprobs(event.logprobs, choice)) if event.logprobs else b"null"
        text = self._opening(choice, b'"text":') + encode(event.text)
        ids = _ids_json(event) + (b',"prompt_token_ids":' + encode(event.prompt_ids) if event.prompt_ids else b"")
        return text + b',"logprobs":' + logprobs + ids + self._end(choice, extra)

    def document_choice(self, choice: Choice) -> dict[str, object]:
        logprobs = _completion_logprobs(choice.logprobs, choice) if choice.logprobs else None
        return {"text": "".join(choice.content), "logprobs": logprobs, **_of_prompt(choice)}


def usage_json(usage: Usage) -> dict[str, object]:
    shown: dict[str, object] = {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_generated,
        "total_tokens": usage.num_prompt + usage.num_generated,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }
    details = ({"reasoning_tokens": usage.num_reasoning} if usage.num_reasoning else {}) | usage.details.as_json()
    return shown | {"completion_tokens_details": details} if details else shown


def _ids(choice: Choice) -> dict[str, object]:
    return {"token_ids": choice.token_ids} if choice.token_ids else {}


def _ids_json(event: Event) -> bytes:
    return b',"token_ids":' + encode(event.token_ids) if event.token_ids else b""


def _prompt_ids(choice: Choice) -> dict[str, object]:
    return {"prompt_token_ids": choice.prompt_ids} if choice.prompt_ids else {}


def _of_prompt(choice: Choice) -> dict[str, object]:
    return {"prompt_token_ids": choice.prompt_ids or None, **scores_json(choice.prompt_scores)}


def scores_json(scores: Scores) -> dict[str, object]:
    """Return vLLM's member: for each token of the prompt an object by ids, null for the first. Each is serialised at once: its objects
    would take far more memory."""
    return {"prompt_logprobs": [msgspec.Raw(encode(_entry_json(entry))) for entry in scores] or None}


def _entry_json(entry: Logprob) -> dict[str, object] | None:
    if entry.logprob is None:
        return None
    tokens = [(None, (entry.id, entry.token, entry.logprob)), *enumerate(entry.top, 1)]
    return {
        str(token_id): {"logprob": value, "rank": rank, "decoded_token": text.decode("utf-8", "replace")}
        for rank, (token_id, text, value) in tokens
    }


def _ending(choice: Choice) -> dict[str, object]:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason, "matched_stop": choice.stop_reason}


def _call_json(call: Call, arguments: str) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _token_list(entries: Iterable[Logprob]) -> dict[str, object]:
    return {"content": logprobs_json(entries), "refusal": None}


def logprobs_json(entries: Iterable[Logprob]) -> list[dict[str, object]]:
    tops = ([_token_json(token, value) for _, token, value in entry.top] for entry in entries)
    return [{**_token_json(entry.token, entry.logprob), "top_logprobs": top} for entry, top in zip(entries, tops, strict=True)]


def _token_json(token: bytes, logprob: float | None) -> dict[str, object]:
    return {"token": _text(token), "logprob": logprob, "bytes": list(token)}


def _completion_logprobs(entries: Iterable[Logprob], choice: Choice) -> dict[str, object]:
    """Return parallel lists. In `top_logprobs` the token itself comes first, then the others in descending order."""
    offsets = []
    for entry in entries:
        offsets.append(choice.num_characters)
        choice.num_characters += len(_text(entry.token))
    return {
        "text_offset": offsets,
        "tokens": [_text(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_likely(entry) for entry in entries],
    }


def _likely(entry: Logprob) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    likely = {_text(entry.token): entry.logprob}
    for _, token, value in entry.top:
        likely.setdefault(_text(token), value)
    return likely


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
