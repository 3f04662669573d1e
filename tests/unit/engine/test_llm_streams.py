"""Outputs of `AsyncLLM` grow with the answer; what has come before is not joined again for each token."""

from types import SimpleNamespace
from typing import Any, cast

from engine.llm.session import Growing
from engine.messages import Event

NUM_TOKENS = 200


def test_each_token_is_joined_once() -> None:
    """Joining all pieces for each token would be quadratic, in the caller's event loop."""
    growing = Growing("1", "Hello", cast(Any, SimpleNamespace(choices={(1, 0): 0})))
    (choice,) = growing._choices.values()
    for count in range(1, NUM_TOKENS + 1):
        growing.add(Event(1, text="ab", num_tokens=count))
        assert len(choice.content) <= 2
        assert growing.output().outputs[0].text == "ab" * count
    assert len(choice.content) == 1 and growing.output().outputs[0].reasoning == ""
