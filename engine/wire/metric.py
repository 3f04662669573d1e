"""Annotations of the fields of `EngineStats`."""

from typing import NamedTuple


class Total(NamedTuple):
    """A counter: the metric's text, and vLLM's name of it after `vllm:` (otherwise `engine_` and the field's name)."""

    text: str
    vllm: str = ""


class Gauge(Total):
    """A current value."""
