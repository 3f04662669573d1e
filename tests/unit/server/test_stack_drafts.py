"""What the scheduler is told for drafts, and what clients are told of them; through the real api and processor."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer

from engine.wire.messages import EngineRequest, RequestOutput
from engine.wire.stats import Stages, TokenDetails
from tests.unit.server.stack import FakeScheduler, Stack, StackOf
from tests.unit.server.test_stack import ids_of

TEXT = "one two three four five six seven eight"


@pytest.fixture
def drafting(stack_of: StackOf, model_folder: Path) -> Iterator[Stack]:
    stack = stack_of(model_folder, draft="lookup")
    yield stack
    stack.recover()


def test_usage_counts_the_drafts_of_kept_tokens(drafting: Stack, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, TEXT)
    num_run = len(ids) - 4

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        outputs = [
            RequestOutput(request.rid, ids[:1], stages=Stages()),
            RequestOutput(request.rid, ids[1:-3], details=TokenDetails(num_run + 2, num_run - 1)),
            RequestOutput(request.rid, ids[-3:], "length", details=TokenDetails(4, 3)),
        ]
        scheduler.send(outputs, [request.rid])

    drafting.scheduler.script = script
    client = openai.OpenAI(base_url=f"{drafting.url}/v1", api_key="none", max_retries=0)
    create = client.chat.completions.create
    answer = create(model="test-model", messages=[{"role": "user", "content": "x"}])
    assert answer.choices[0].message.content == TEXT and answer.usage and answer.usage.completion_tokens_details
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (num_run + 2, 3 + 1)
    shown = drafting.chat("x", stop=["three"]).json()["usage"]["completion_tokens_details"]
    num_kept = next(n for n in range(1, len(ids)) if "three" in tokenizer.decode(ids[:n]))
    assert shown == {"accepted_prediction_tokens": num_kept - 1, "rejected_prediction_tokens": num_run + 2 - (num_kept - 1)}
    events = list(
        create(model="test-model", messages=[{"role": "user", "content": "x"}], stream=True, stream_options={"include_usage": True})
    )
    assert events[-1].usage and events[-1].usage.completion_tokens_details == answer.usage.completion_tokens_details
    assert sum(bool(event.choices and event.choices[0].delta.content) for event in events) >= len(ids) - 1
    body = drafting.http.post("/v1/responses", json={"input": "x"}).json()
    assert body["usage"]["output_tokens_details"]["accepted_prediction_tokens"] == num_run + 2
