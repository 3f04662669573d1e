"""Fields that shape prompts and texts, through the real api and processor; text completions; what is no JSON."""

from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from engine.messages import (
    EngineRequest,
    RequestOutput,
)
from engine.params import PromptLogprobs, TokenLogprobs
from engine.stats import Stages
from server.processor.detokenize import TokenTable
from tests.e2e.serving import data_uri, picture
from tests.unit.server.stack import FakeScheduler, Stack, answer_ids, answer_text
from tests.unit.server.test_stack import chunks_of, ids_of


def prompt_text(stack: Stack, tokenizer: Tokenizer) -> str:
    return str(tokenizer.decode(stack.scheduler.prompt(stack.scheduler.requests[-1]), skip_special_tokens=False))


def echo_number(scheduler: FakeScheduler, request: object) -> None:
    """Answers a prompt of k tokens with its first token, k times."""
    ids = scheduler.prompt(request)  # type: ignore[arg-type]
    answer_ids([ids[0]] * len(ids), reason="length")(scheduler, request)  # type: ignore[arg-type]


# ---- chat ----------------------------------------------------------------------------------------------------------------------------


def test_the_last_message_goes_on(stack: Stack, tokenizer: Tokenizer) -> None:
    """Red if a prefilled answer is closed, or followed by the beginning of another one."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is"}]
    for content in ("The answer is", [{"type": "text", "text": "The answer is"}]):
        messages[-1]["content"] = content  # type: ignore[assignment]
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        assert stack.http.post("/v1/chat/completions", json=body).status_code == 200
        assert prompt_text(stack, tokenizer).endswith("<|im_start|>assistant\nThe answer is")


def test_request_cannot_bring_a_template(stack: Stack) -> None:
    """Red if a template in a request is ignored, or if the error does not name the flag that sets one."""
    bodies = ("/v1/chat/completions", "messages"), ("/tokenize", "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")
    for path, field in bodies:
        body = {field: [{"role": "user", "content": "x"}], "max_tokens": 5, "chat_template": "y"}
        refused = stack.http.post(path, json={name: value for name, value in body.items() if field != "input" or name != "max_tokens"})
        assert refused.status_code == 400 and "`--chat-template`" in refused.text, refused.text


def test_no_generation_prompt(stack: Stack, tokenizer: Tokenizer) -> None:
    assert stack.chat("x", add_generation_prompt=False).status_code == 200
    assert prompt_text(stack, tokenizer) == "<|im_start|>user\nx<|im_end|>\n"


def test_special_tokens_are_shown_on_demand(stack: Stack, tokenizer: Tokenizer) -> None:
    """Red if they are shown unasked, or if the one that ends the answer is."""
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    stack.scheduler.script = answer_ids([start, *ids_of(tokenizer, "ü"), end])
    assert stack.chat("x").json()["choices"][0]["message"]["content"] == "ü"
    assert stack.chat("x", skip_special_tokens=False).json()["choices"][0]["message"]["content"] == "<|im_start|>ü"


def test_a_stop_string_may_be_shown(stack: Stack, tokenizer: Tokenizer) -> None:
    """Red if it is cut off although it was asked for, if anything behind it is shown, or if the reason is not told."""
    stack.scheduler.script = answer_ids(ids_of(tokenizer, "keep this END and never this"))
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        for included, text in ((False, "keep this "), (True, "keep this END")):
            choice = stack.chat("x", stop=["never", "END"], **{name: included}).json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "END"), name


def test_the_reason_of_a_stop(stack: Stack, tokenizer: Tokenizer) -> None:
    """Red if a stop token that the client named is not told from the model's own end."""
    word, end = ids_of(tokenizer, "x")[0], tokenizer.token_to_id("<|im_end|>")
    stack.scheduler.script = answer_ids([*ids_of(tokenizer, "so"), word])
    choice = stack.chat("x", stop_token_ids=[word]).json()["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("so", word)
    stack.scheduler.script = answer_ids([*ids_of(tokenizer, "so"), end])
    assert stack.chat("x", stop_token_ids=[word]).json()["choices"][0]["stop_reason"] is None
    assert chunks_of(stack.chat("x", stream=True).text)[-1]["choices"][0]["stop_reason"] is None  # type: ignore[index]


def test_parts_by_their_other_names(stack: Stack, tokenizer: Tokenizer) -> None:
    """Red if parts of the responses API, or a refusal in a history, do not reach the model."""
    content = [{"type": "input_text", "text": "one"}, {"type": "refusal", "refusal": "two"}]
    assert stack.chat(content).status_code == 200
    assert prompt_text(stack, tokenizer).startswith("<|im_start|>user\nonetwo<|im_end|>")


# ---- text completions ----------------------------------------------------------------------------------------------------------------


def test_a_completion(stack: Stack, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """Red if a prompt gets a chat template, if special tokens in it are spelt out, or if the default length is not OpenAI's."""
    stack.scheduler.script = answer_ids(ids_of(tokenizer, " world"), reason="length")
    answer = client.completions.create(model="test-model", prompt="<|im_start|>user\nhello")
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == ("text_completion", " world", "length")
    request = stack.scheduler.requests[-1]
    assert stack.scheduler.prompt(request) == tokenizer.encode("<|im_start|>user\nhello", add_special_tokens=False).ids
    assert request.params.max_tokens == 16
    assert answer.usage is not None and answer.usage.prompt_tokens == len(stack.scheduler.prompt(request))


def test_a_batch_of_prompts(stack: Stack, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """Red if answers change places, if usage counts one prompt only, or if a stream's chunks do not say whose they are."""
    stack.scheduler.script = echo_number
    prompts = [[70, 70], [71], [72, 72, 72]]
    expected = [tokenizer.decode([ids[0]] * len(ids)) for ids in prompts]
    answer = client.completions.create(model="test-model", prompt=prompts)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6)
    texts, reasons = ["", "", ""], {}
    for chunk in client.completions.create(model="test-model", prompt=prompts, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert (texts, reasons) == (expected, {0: "length", 1: "length", 2: "length"})
    assert chunk.usage is not None and chunk.usage.completion_tokens == 6


def test_an_echo(stack: Stack, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """Red if the prompt is not in front of the answer, in a document or in a stream, or comes twice."""
    stack.scheduler.script = answer_ids(ids_of(tokenizer, " and more"))
    for prompt in ("Grüße, 世界", [70, 71, 72]):
        expected = (prompt if isinstance(prompt, str) else tokenizer.decode(prompt)) + " and more"
        assert client.completions.create(model="test-model", prompt=prompt, echo=True).choices[0].text == expected
        stream = client.completions.create(model="test-model", prompt=prompt, echo=True, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_echo_of_nothing_but_the_prompt(
    stack: Stack, client: openai.OpenAI, tokenizer: Tokenizer, answer: list[int], logprobs: int | None, stream: bool
) -> None:
    """Red if `max_tokens: 0`, with which evaluations score texts, is refused, or if the token that the engine draws anyway is shown."""
    ANSWER[:] = answer[-1:]  # an end token
    stack.scheduler.script = tell if logprobs else answer_ids(ANSWER)
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    given = client.completions.create(
        model="test-model", prompt="Hello you", echo=True, max_tokens=0, logprobs=logprobs, stream=stream, **usage
    )  # type: ignore[call-overload]
    chunks = list(given) if stream else [given]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert stack.scheduler.requests[-1].params.max_tokens == 1
    assert ("".join(choice.text for choice in choices), choices[-1].finish_reason) == ("Hello you", "length")
    num_prompt = len(ids_of(tokenizer, "Hello you"))
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (num_prompt, 0)
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    assert "".join(tokens) == ("Hello you" if logprobs else "")


def test_one_bad_prompt_of_a_batch(stack: Stack, tokenizer: Tokenizer) -> None:
    """Red if the others go on for nobody, or if a placeholder of an image gets into a prompt that has none."""
    for bad in ("<|image_pad|>", "word " * 5000):
        response = stack.http.post("/v1/completions", json={"prompt": ["x", bad, "y"]})
        assert response.status_code == 400, response.text
    image_token = tokenizer.token_to_id("<|image_pad|>")
    response = stack.http.post("/v1/completions", json={"prompt": [image_token]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


# ---- log-probabilities ---------------------------------------------------------------------------------------------------------------

TOP = 2


def tell(scheduler: FakeScheduler, request: EngineRequest) -> None:
    """Answers with a character in two tokens, a word and the end. Token i has -i/2; the likely ones beside it are tokens 70 and 71."""
    ids = [*ANSWER]
    entries = [TokenLogprobs(-i / 2, [70, 71], [-1.0, -2.0]) for i in range(len(ids))]
    num_prompt = len(scheduler.prompt(request))
    values = np.arange(num_prompt - 1, dtype=np.float32)
    tops = np.tile(np.array([70, 71], np.int32), (num_prompt - 1, 1)), np.tile(np.array([-1, -2], np.float32), (num_prompt - 1, 1))
    wanted = request.params.prompt_logprobs is not None
    prompt = PromptLogprobs(1, TOP, (-values).tobytes(), tops[0].tobytes(), tops[1].tobytes()) if wanted and num_prompt > 1 else None
    for i, token_id in enumerate(ids):
        is_first, is_last = i == 0, i == len(ids) - 1
        reason, stages = ("stop" if is_last else None), (Stages() if is_first else None)
        outputs = [
            RequestOutput(request.rid, [token_id], reason, None, 0, stages, [entries[i]], prompt if is_first and not index else None, index)  # type: ignore[arg-type]
            for index in range(request.n)  # as the scheduler says it: the prompt's with the first answer alone
        ]
        scheduler.send(outputs, [request.rid] if is_last else [])


ANSWER: list[int] = []


@pytest.fixture
def answer(tokenizer: Tokenizer) -> list[int]:
    ANSWER[:] = [*ids_of(tokenizer, "🙂 so"), tokenizer.token_to_id("<|im_end|>")]
    assert len(ids_of(tokenizer, "🙂")) > 1
    return ANSWER


def test_token_ids_beside_the_text(stack: Stack, tokenizer: Tokenizer, answer: list[int]) -> None:
    """Red if an id is lost where no text comes with it, if the prompt's are not those that are computed, or if a stream differs."""
    stack.scheduler.script = tell
    asked = {"return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True}
    body = stack.chat("x", **asked).json()
    (choice,) = body["choices"]
    prompt = stack.scheduler.prompt(stack.scheduler.requests[-1])
    assert choice["token_ids"] == answer and body["prompt_token_ids"] == prompt
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token_id}" for token_id in answer]
    chunks: list[Any] = chunks_of(stack.chat("x", stream=True, **asked).text)
    assert chunks[0]["prompt_token_ids"] == prompt and not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", [])] == answer
    text = {"prompt": prompt, "return_token_ids": True}
    (choice,) = stack.http.post("/v1/completions", json=text).json()["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (answer, prompt)
    chunks = chunks_of(stack.http.post("/v1/completions", json={**text, "stream": True}).text)
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", [])] == answer
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt
    assert "token_ids" not in stack.chat("x").json()["choices"][0]


@pytest.mark.parametrize(
    ("text", "stop", "fields", "shown"),
    [
        ("keep this END and never", "END", {}, "keep this "), ("keep this END and never", "his E", {}, "keep t"),
        ("keep this END and never", "END", {"include_stop_str_in_output": True}, "keep this END"), ("END", "END", {}, ""),
        ("so🙂END", "🙂END", {}, "so"), ("so 🙂E", "🙂EN", {}, "so 🙂E"), ("keep EN", "END", {}, "keep EN"),
    ],
)  # fmt: skip
def test_what_is_told_of_tokens_ends_with_the_text(
    stack: Stack, tokenizer: Tokenizer, text: str, stop: str, fields: dict[str, Any], shown: str
) -> None:
    """Red if tokens of a stop string that was cut are told, if one of whose text a part is shown is not, or if a stream tells others."""
    ANSWER[:] = [*ids_of(tokenizer, text), tokenizer.token_to_id("<|im_end|>")]
    stack.scheduler.script = tell
    spelling, names = TokenTable(tokenizer).spelling, {"return_token_ids": True, "return_tokens_as_token_ids": True, "stop": stop}
    kept = list(ANSWER) if shown == text else []
    while sum(len(spelling(token_id)) for token_id in kept) < len(shown.encode()):
        kept.append(ANSWER[len(kept)])
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "x", "logprobs": 1})):
        for stream in (False, True):
            response = stack.http.post(path, json={**body, **names, **fields, "stream": stream})
            parts: list[Any] = chunks_of(response.text) if stream else [response.json()]
            choices = [part["choices"][0] for part in parts]
            assert [token_id for choice in choices for token_id in choice.get("token_ids", [])] == kept
            told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            tokens = [token for part in told for token in part.get("tokens") or [entry["token"] for entry in part["content"]]]
            assert tokens == [f"token_id:{token_id}" for token_id in kept]
            said = [choice if "text" in choice else choice.get("message", choice.get("delta")) for choice in choices]
            assert "".join(part.get("text", part.get("content", "")) for part in said) == shown


def test_log_probabilities_of_the_prompt(stack: Stack, tokenizer: Tokenizer, answer: list[int]) -> None:
    """Red if places shift, if a token is told twice, or if they get into the answer's text or log-probabilities."""
    stack.scheduler.script = tell
    for n in (1, 2):
        body = stack.chat("x", prompt_logprobs=TOP, n=n).json()
        places, prompt = body["prompt_logprobs"], stack.scheduler.prompt(stack.scheduler.requests[-1])
        assert len(places) == len(prompt) and places[0] is None
        assert len(body["choices"][0]["logprobs"]["content"]) == len(answer)
        for i, (token_id, place) in enumerate(zip(prompt[1:], places[1:], strict=True)):
            own = place[str(token_id)]
            assert own["decoded_token"] == tokenizer.decode([token_id], skip_special_tokens=False)
            if token_id not in (70, 71):
                assert own["logprob"] == -i and own["rank"] is None
                assert (place["70"]["rank"], place["71"]["rank"], len(place)) == (1, 2, 3)
    (choice,) = stack.http.post("/v1/completions", json={"prompt": prompt, "prompt_logprobs": 0}).json()["choices"]
    assert [list(place) for place in choice["prompt_logprobs"][1:]] and choice["text"] == "🙂 so"
    for fields in ({"stream": True}, {"echo": True, "logprobs": 1}):
        refused = stack.http.post("/v1/completions", json={"prompt": "x", "prompt_logprobs": 1, **fields})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


def test_prompts_are_truncated(stack: Stack) -> None:
    """Red if the wrong end is kept, if a prompt beyond the context is refused all the same, or if half an image is left."""
    ids = [*range(70, 90)]
    for fields, kept in (
        ({"truncate_prompt_tokens": 5}, ids[-5:]), ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": 50}, ids), ({}, ids),
    ):  # fmt: skip
        assert stack.http.post("/v1/completions", json={"prompt": ids, "max_tokens": 2, **fields}).status_code == 200
        assert stack.scheduler.prompt(stack.scheduler.requests[-1]) == kept
    long = {"prompt": "word " * 20_000, "max_tokens": 7, "truncate_prompt_tokens": -1}
    assert stack.http.post("/v1/completions", json=long).status_code == 200
    assert len(stack.scheduler.prompt(stack.scheduler.requests[-1])) == stack.scheduler.max_model_len - 7
    shown = [{"type": "image_url", "image_url": {"url": data_uri(picture(1, 64, 64))}}]
    refused = stack.chat(shown, truncate_prompt_tokens=5)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "truncate_prompt_tokens"


def test_log_probabilities_of_a_chat(stack: Stack, client: openai.OpenAI, tokenizer: Tokenizer, answer: list[int]) -> None:
    """Red if a token of the answer has no entry, if bytes of half a character are lost, or if a stream has other ones than a document."""
    stack.scheduler.script = tell
    asked = {"model": "test-model", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": TOP}
    document = client.chat.completions.create(**asked).choices[0]  # type: ignore[call-overload]
    assert document.message.content == "🙂 so"
    entries = document.logprobs.content
    assert [entry.logprob for entry in entries] == [-i / 2 for i in range(len(answer))]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "🙂 so<|im_end|>"
    likely = [(tokenizer.decode([70]), -1.0), (tokenizer.decode([71]), -2.0)]
    assert all([(top.token, top.logprob) for top in entry.top_logprobs] == likely for entry in entries)
    chunks = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    streamed = [entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content]
    assert streamed == entries
    stack.scheduler.script = answer_text
    assert stack.chat("x", logprobs=False).json()["choices"][0]["logprobs"] is None
    assert stack.scheduler.requests[-1].params.logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Grüße, 世界", [70]])
def test_log_probabilities_of_a_completion(
    stack: Stack, client: openai.OpenAI, tokenizer: Tokenizer, answer: list[int], prompt: str | list[int], stream: bool
) -> None:
    """Red if the lists are not parallel, or if the prompt's are not in front: evaluations cut them at the length of the context."""
    stack.scheduler.script = tell
    given = client.completions.create(model="test-model", prompt=prompt, echo=True, logprobs=TOP, stream=stream)
    found = [chunk.choices[0].logprobs for chunk in given if chunk.choices[0].logprobs] if stream else [given.choices[0].logprobs]
    assert stack.scheduler.requests[-1].params.prompt_logprobs == TOP
    ids = ids_of(tokenizer, prompt) if isinstance(prompt, str) else prompt
    values = [value for part in found for value in part.token_logprobs]
    assert values == [None, *(-float(i) for i in range(len(ids) - 1)), *(-i / 2 for i in range(len(answer)))]
    tokens, likely = [token for part in found for token in part.tokens], [top for part in found for top in part.top_logprobs]
    assert len(tokens) == len(likely) == len(values) and likely[0] is None
    assert all(token in top and len(top) in (TOP, TOP + 1) for token, top in zip(tokens[1:], likely[1:], strict=True))
    offsets = [offset for part in found for offset in part.text_offset]
    assert offsets[0] == 0 and offsets[1] == len(tokens[0]) and offsets == sorted(offsets)


def test_bad_words_are_tokens(stack: Stack, tokenizer: Tokenizer) -> None:
    """Red if a word is not forbidden behind a space, or if one that is too long is cut."""
    assert stack.chat("x", bad_words=["so"]).status_code == 200
    words = stack.scheduler.requests[-1].params.bad_words
    assert words == (tuple(ids_of(tokenizer, "so")), tuple(ids_of(tokenizer, " so")))
    response = stack.chat("x", bad_words=["a very long word " * 20])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "bad_words")


# ---- what is no JSON -----------------------------------------------------------------------------------------------------------------


def test_only_json_is_read(stack: Stack) -> None:
    """Red if a web page can make a browser send something here that needs no permission, or if compressed bytes are taken for JSON."""
    content = b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x"}'
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    fine = "application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"
    for path in ("/v1/chat/completions", "/v1/completions", "/metrics", "/nowhere"):
        for kind in fine:
            assert stack.http.post(path, content=content, headers={"Content-Type": kind}).status_code != 415, (path, kind)
        assert stack.http.post(path, content=content, headers={**headers, "Content-Encoding": "identity"}).status_code != 415
        for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            refused = stack.http.post(path, content=content, headers={"Content-Type": kind})
            assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type"), (path, kind)
        assert stack.http.post(path, content=content, headers=headers).status_code == 415
    for given, status in (({}, 200), ({"Origin": "https://example.org"}, 415)):  # tools flush the cache without a body, web pages do not
        assert httpx.post(f"{stack.url}/flush_cache", headers=given).status_code == status


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_begins_with_the_prompts(stack: Stack, client: openai.OpenAI, answer: list[int], stream: bool) -> None:
    """Red if only the first of several answers has them, although all begin with the prompt's text."""
    stack.scheduler.script = tell
    given = client.completions.create(model="test-model", prompt="Hello", echo=True, logprobs=TOP, n=3, stream=stream)
    chunks = list(given) if stream else [given]
    values: dict[int, list[float | None]] = {0: [], 1: [], 2: []}
    for choice in (choice for chunk in chunks for choice in chunk.choices if choice.logprobs):
        values[choice.index] += choice.logprobs.token_logprobs
    assert values[0] == values[1] == values[2] and len(values[0]) > len(answer)
