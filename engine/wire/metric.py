"""Annotations of the fields of `EngineStats`, and metrics whose labels are what they tell."""

from typing import NamedTuple

import msgspec


class Total(NamedTuple):
    """A counter: the metric's text, and vLLM's name of it after `vllm:` (otherwise `engine_` and the field's name)."""

    text: str
    vllm: str = ""


class Gauge(Total):
    """A current value."""


class Info(msgspec.Struct):
    """A gauge whose value is the time in seconds since 1970 at which its labels held; `name` has its prefix."""

    name: str
    text: str
    labels: dict[str, str]
    value: float
