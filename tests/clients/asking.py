"""What the tests of several clients ask, in the form of chat completions."""

import base64
from pathlib import Path
from typing import Any, Literal

import pydantic

from models.demo import CHECKPOINT

NUMBER = Path(CHECKPOINT).parent / "pictures" / "number.png"
DAYS: dict[str, Any] = {
    "type": "object",
    "properties": {"days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["days", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "forecast", "parameters": DAYS, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]


class Reading(pydantic.BaseModel):
    number: int
    colour: Literal["red", "blue"]


def data_url() -> str:
    return "data:image/png;base64," + base64.b64encode(NUMBER.read_bytes()).decode()


def question(text: str = "What number is in picture 1?") -> list[Any]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url()}}, {"type": "text", "text": text}]}]
