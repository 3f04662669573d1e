"""Many long prompts in one `/v1/completions`: every step that computes a part of them computes the next token of a running stream, too."""

import threading

import httpx
import pytest

from tests.e2e.serving import Engine, chat_body
from tests.eventually import eventually

pytestmark = pytest.mark.e2e

NUM_PROMPTS, PROMPT_BYTES = 16, 5_000
STREAM_TOKENS = 1500
OTHER_STEPS = 60  # of the stream's own prompt, of the last answers after the stream's end, and of steps in flight


def test_streams_of_others_go_on(demo: Engine) -> None:
    """Red if prompts are prefilled in steps without the rows that decode: the stream would have fewer tokens than there are steps."""
    prompts = [f"{i} " + f"word{i} and another one, " * (PROMPT_BYTES // 23) for i in range(NUM_PROMPTS)]
    body = chat_body("Hello", max_tokens=STREAM_TOKENS, ignore_eos=True, stream=True)
    answers: list[httpx.Response] = []

    def complete() -> None:
        answers.append(httpx.post(f"{demo.url}/v1/completions", json={"prompt": prompts, "max_tokens": 4}, timeout=300))

    num_tokens, num_at_answer = 0, 0
    steps = demo.metric("engine_steps_total")
    client = threading.Thread(target=complete)
    with httpx.stream("POST", f"{demo.url}/v1/chat/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            num_tokens += '"content":"' in line
            if num_tokens == 1 and client.ident is None:
                client.start()
            if answers and not num_at_answer:
                num_at_answer = num_tokens
    client.join()
    assert answers[0].status_code == 200, answers[0].text
    assert num_at_answer > 16, "the stream went on while the prompts were computed"
    eventually(lambda: not demo.metric("engine_num_running") and demo.metric("engine_steps_total") > steps, "an idle engine")
    assert demo.metric("engine_steps_total") - steps <= STREAM_TOKENS + OTHER_STEPS
