"""Fields that shape prompts and texts, through the real api and processor; text completions; what is no JSON."""

from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from engine.wire.messages import EngineRequest, RequestOutput
from engine.wire.params import TokenLogprobs
from engine.wire.reports import PromptLogprobs
from engine.wire.stats import Stages
from server.processor.intake import MAX_PROMPT_SCORES
from server.processor.text.output_text import TokenTable
from tests.unit.server.stack import FakeScheduler, Script, Stack, answer_ids
from tests.unit.server.test_stack import chunks_of, ids_of, user

TOP = 2
SMILE = "🙂 so"  # its first character has several tokens


def prompt_text(stack: Stack, tokenizer: Tokenizer) -> str:
    return str(tokenizer.decode(stack.prompt(), skip_special_tokens=False))


def ask(stack: Stack, **fields: Any) -> list[Any]:
    chat = {"messages": user("x")}
    path, body = ("/v1/completions", fields) if "prompt" in fields else ("/v1/chat/completions", {**chat, **fields})
    response = stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return chunks_of(response.text) if fields.get("stream") else [response.json()]


def choices_of(parts: list[Any], index: int = 0) -> list[Any]:
    return [choice for part in parts for choice in part["choices"] if choice["index"] == index]


def text_of(choices: list[Any]) -> str:
    said = [choice if "text" in choice else choice.get("message", choice.get("delta")) for choice in choices]
    return "".join(part.get("text", part.get("content", "")) for part in said)


def check_refusal(response: httpx.Response, param: str) -> None:
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def tell(ids: list[int]) -> Script:
    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        num_places = len(scheduler.prompt(request)) - 1
        values = -np.arange(num_places, dtype=np.float32)
        top_ids, tops = np.tile(np.array([70, 71], np.int32), num_places), np.tile(np.array([-1, -2], np.float32), num_places)
        of_prompt = None
        if request.params.prompt_logprobs is not None and num_places:
            of_prompt = PromptLogprobs(1, TOP, values.tobytes(), top_ids.tobytes(), tops.tobytes())
        for i, token_id in enumerate(ids):
            is_first, is_last = i == 0, i == len(ids) - 1
            entry = [TokenLogprobs(-i / 2, [70, 71], [-1.0, -2.0])]
            outputs = [
                RequestOutput(
                    request.rid, [token_id], "stop" if is_last else None, stages=Stages() if is_first else None, logprobs=entry,
                    report=of_prompt if is_first and not index else None, index=index,
                )
                for index in range(request.n)  # as the scheduler says it: the prompt's with the first answer alone
            ]  # fmt: skip
            scheduler.send(outputs, [request.rid] if is_last else [])

    return script


def ended(tokenizer: Tokenizer, text: str = SMILE) -> list[int]:
    return [*ids_of(tokenizer, text), tokenizer.token_to_id("<|im_end|>")]


def test_where_a_prompt_ends(stack: Stack, tokenizer: Tokenizer) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is"}]
    for content in ("The answer is", [{"type": "text", "text": "The answer is"}]):
        messages[-1]["content"] = content
        ask(stack, messages=messages, continue_final_message=True, add_generation_prompt=False)
        assert prompt_text(stack, tokenizer).endswith("<|im_start|>assistant\nThe answer is")
    ask(stack, add_generation_prompt=False)
    assert prompt_text(stack, tokenizer) == "<|im_start|>user\nx<|im_end|>\n"
    assert stack.chat([{"type": "input_text", "text": "one"}, {"type": "refusal", "refusal": "two"}]).status_code == 200
    assert prompt_text(stack, tokenizer).startswith("<|im_start|>user\nonetwo<|im_end|>")


def test_special_tokens_are_shown_on_demand(stack: Stack, tokenizer: Tokenizer) -> None:
    stack.script = answer_ids([tokenizer.token_to_id("<|im_start|>"), *ended(tokenizer, "ü")])
    assert text_of(choices_of(ask(stack))) == "ü"
    assert text_of(choices_of(ask(stack, skip_special_tokens=False))) == "<|im_start|>ü"


def test_the_reason_of_a_stop(stack: Stack, tokenizer: Tokenizer) -> None:
    word, end = ids_of(tokenizer, "x")[0], tokenizer.token_to_id("<|im_end|>")
    for last, expected in ((word, word), (end, None)):
        stack.script = answer_ids([*ids_of(tokenizer, "so"), last])
        for stream in (False, True):
            choices = choices_of(ask(stack, stop_token_ids=[word], stream=stream))
            assert (text_of(choices), choices[-1]["stop_reason"]) == ("so", expected)
    stack.script = answer_ids(ids_of(tokenizer, "sox"), reason="length")
    assert text_of(choices_of(ask(stack, stop_token_ids=[word]))) == "sox"
    stack.script = answer_ids(ids_of(tokenizer, "keep this END and never this"))
    (choice,) = choices_of(ask(stack, stop=["never", "END"], include_stop_str_in_output=True))
    assert (text_of([choice]), choice["finish_reason"], choice["stop_reason"]) == ("keep this END", "stop", "END")


def test_bad_words_are_tokens(stack: Stack, tokenizer: Tokenizer) -> None:
    ask(stack, bad_words=["so"])
    words = stack.last.params.bad_words
    assert words == (tuple(ids_of(tokenizer, "so")), tuple(ids_of(tokenizer, " so")))
    check_refusal(stack.chat("x", bad_words=["a very long word " * 20]), "bad_words")


def test_a_batch_of_prompts(stack: Stack, tokenizer: Tokenizer) -> None:

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        answer_ids(scheduler.prompt(request), reason="length")(scheduler, request)

    stack.script = script
    prompts = [[70, 70], [71], [72, 72, 72]]
    for options in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        parts = ask(stack, prompt=prompts, **options)
        assert stack.last.params.max_tokens == 16
        for index, prompt in enumerate(prompts):
            choices = choices_of(parts, index)
            assert text_of(choices) == tokenizer.decode(prompt)
            assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert (parts[-1]["usage"]["prompt_tokens"], parts[-1]["usage"]["completion_tokens"]) == (6, 6)


def test_an_echo(stack: Stack, tokenizer: Tokenizer) -> None:
    for stream in (False, True):
        stack.script = answer_ids(ids_of(tokenizer, " and more"))
        for prompt in ("Grüße, 世界", [70, 71, 72]):
            shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
            assert text_of(choices_of(ask(stack, prompt=prompt, echo=True, stream=stream))) == shown + " and more"
        stack.script = tell(ended(tokenizer)[-1:])
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        parts = ask(stack, prompt="Hello you", echo=True, max_tokens=0, logprobs=2, stream=stream, **usage)
        choices = choices_of(parts)
        assert stack.last.params.max_tokens == 0
        assert (text_of(choices), choices[-1]["finish_reason"]) == ("Hello you", "length")
        assert (parts[-1]["usage"]["prompt_tokens"], parts[-1]["usage"]["completion_tokens"]) == (len(ids_of(tokenizer, "Hello you")), 0)
        tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        assert "".join(tokens) == "Hello you"


def test_one_bad_prompt_of_a_batch(stack: Stack, tokenizer: Tokenizer) -> None:
    for bad in ("<|image_pad|>", "word " * 5000):
        check_refusal(stack.http.post("/v1/completions", json={"prompt": ["x", bad, "y"]}), "prompt")
    check_refusal(stack.http.post("/v1/completions", json={"prompt": [tokenizer.token_to_id("<|image_pad|>")]}), "prompt")


def test_token_ids_beside_the_text(stack: Stack, tokenizer: Tokenizer) -> None:
    answer = ended(tokenizer)
    stack.script = tell(answer)
    for stream in (False, True):
        parts = ask(stack, return_token_ids=True, stream=stream)
        prompt = stack.prompt()
        assert parts[0]["prompt_token_ids"] == prompt and not any("prompt_token_ids" in part for part in parts[1:])
        texts = choices_of(ask(stack, prompt=prompt, return_token_ids=True, stream=stream))
        assert texts[0]["prompt_token_ids"] == prompt
        for choices in (choices_of(parts), texts):
            assert [token_id for choice in choices for token_id in choice.get("token_ids", [])] == answer
    assert "token_ids" not in choices_of(ask(stack))[0]


STOPPED: list[tuple[str, str, dict[str, Any], str]] = [
    ("keep this END and never", "END", {}, "keep this "), ("keep this END and never", "his E", {}, "keep t"),
    ("keep this END and never", "END", {"include_stop_str_in_output": True}, "keep this END"), ("END", "END", {}, ""),
    ("so🙂END", "🙂END", {}, "so"), ("so 🙂E", "🙂EN", {}, "so 🙂E"), ("keep EN", "END", {}, "keep EN"),
]  # fmt: skip


def test_every_token_up_to_the_stop_string_is_reported(stack: Stack, tokenizer: Tokenizer) -> None:
    spelling, names = TokenTable(tokenizer).spelling, {"return_token_ids": True}
    for text, stop, fields, shown in STOPPED:
        answer = ended(tokenizer, text)
        stack.script = tell(answer)
        kept = list[int]()
        while len(kept) < len(answer) and stop.encode() not in b"".join(map(spelling, kept)):
            kept.append(answer[len(kept)])
        for asked in ({"logprobs": True}, {"prompt": "x", "logprobs": 1}):
            for stream in (False, True):
                choices = choices_of(ask(stack, **asked, **names, **fields, stop=stop, stream=stream))
                assert [token_id for choice in choices for token_id in choice.get("token_ids", [])] == kept, (text, stop)
                told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
                tokens = [token for part in told for token in part.get("tokens") or [entry["token"] for entry in part["content"]]]
                assert tokens == [spelling(token_id).decode(errors="replace") for token_id in kept], (text, stop)
                assert text_of(choices) == shown, (text, stop)


def test_log_probabilities_of_the_prompt(stack: Stack, tokenizer: Tokenizer) -> None:
    answer = ended(tokenizer)
    stack.script = tell(answer)
    for n in (1, 2):
        (body,) = ask(stack, prompt_logprobs=TOP, n=n)
        places, prompt = body["prompt_logprobs"], stack.prompt()
        assert len(places) == len(prompt) and places[0] is None
        assert len(body["choices"][0]["logprobs"]["content"]) == len(answer)
        for i, (token_id, place) in enumerate(zip(prompt[1:], places[1:], strict=True)):
            own = place[str(token_id)]
            assert own["decoded_token"] == tokenizer.decode([token_id], skip_special_tokens=False)
            if token_id not in (70, 71):
                assert own["logprob"] == -i and own["rank"] is None
                assert (place["70"]["rank"], place["71"]["rank"], len(place)) == (1, 2, 3)
    (choice,) = choices_of(ask(stack, prompt=prompt, prompt_logprobs=0))
    assert [list(place) for place in choice["prompt_logprobs"][1:]] and choice["text"] == SMILE
    check_refusal(stack.http.post("/v1/completions", json={"prompt": "x", "prompt_logprobs": 1, "stream": True}), "prompt_logprobs")
    for text, fields in (("word " * 1000, {"n": 16}), (["word " * 1000] * 16, {})):
        many = stack.http.post("/v1/completions", json={"prompt": text, "prompt_logprobs": 20, **fields})
        assert many.status_code == 400 and f"{MAX_PROMPT_SCORES:,}" in many.json()["error"]["message"], many.text


def test_log_probabilities_of_a_chat(stack: Stack, tokenizer: Tokenizer) -> None:
    stack.script = tell(ended(tokenizer))
    (choice,) = choices_of(ask(stack, logprobs=True, top_logprobs=TOP))
    entries = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [-i / 2 for i in range(len(entries))]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == SMILE + "<|im_end|>"
    assert all([top["logprob"] for top in entry["top_logprobs"]] == [-1, -2] for entry in entries)


def test_log_probabilities_of_a_completion(stack: Stack, tokenizer: Tokenizer) -> None:
    """Evaluations cut the prompt's, which are in front of each answer's, at the length of the context."""
    answer = ended(tokenizer)
    stack.script = tell(answer)
    for prompt, n, stream in (("Grüße, 世界", 1, False), ([70], 1, False), ([70], 1, True), ("Hello", 3, False), ("Hello", 3, True)):
        parts = ask(stack, prompt=prompt, echo=True, logprobs=TOP, n=n, stream=stream)
        assert stack.last.params.prompt_logprobs == TOP
        ids = ids_of(tokenizer, prompt) if isinstance(prompt, str) else prompt
        for index in range(n):
            found = [choice["logprobs"] for choice in choices_of(parts, index) if choice["logprobs"]]
            values, tokens, likely, offsets = (
                [value for part in found for value in part[name]] for name in ("token_logprobs", "tokens", "top_logprobs", "text_offset")
            )
            assert values == [None, *(-float(i) for i in range(len(ids) - 1)), *(-i / 2 for i in range(len(answer)))]
            assert len(tokens) == len(likely) == len(values) and likely[0] is None
            assert all(token in top and len(top) in (TOP, TOP + 1) for token, top in zip(tokens[1:], likely[1:], strict=True))
            assert offsets[0] == 0 and offsets[1] == len(tokens[0]) and offsets == sorted(offsets)


def test_only_json_is_read(stack: Stack) -> None:
    """A web page can make a browser send other types without permission."""
    content = b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x"}'
    for path in ("/v1/chat/completions", "/metrics", "/nowhere"):
        for kind, is_read in (
            ("application/json", True), ("Application/JSON; charset=utf-8", True), ("application/vnd.api+json", True), ("", False),
            ("text/plain", False), ("application/x-www-form-urlencoded", False), ("multipart/form-data; boundary=x", False),
        ):  # fmt: skip
            response = stack.http.post(path, content=content, headers={"Content-Type": kind})
            assert (response.status_code != 415) == is_read, (path, kind)
            assert is_read or response.json()["error"]["code"] == "unsupported_media_type"
    for given, status in (({}, 200), ({"Origin": "https://example.org"}, 415)):  # tools flush the cache without a body, web pages do not
        assert httpx.post(f"{stack.url}/flush_cache", headers=given).status_code == status
