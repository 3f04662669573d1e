"""JSON to checked requests, and every mistake in it to a 400 in our own words that names the field. Called by `server/api`."""

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from server.errors import RequestError

# By pydantic's kind of error. Braces name what it knows about it.
WORDS = {
    "missing": "is missing",
    "extra_forbidden": "is not supported by this server; leave it out",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "none_required": "is not supported by this server; leave it out",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_unicode": "must be valid Unicode",
    "value_error": "{error}",
}

MAX_VALUES = 200_000  # 10,000 messages of several parts, or a thousand large tools
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
STRINGS = re.compile(rb'(?:[^"]*+"(?:[^"\\]++|\\.)*+"){1,4096}', re.DOTALL)  # at once: the others threads get their turn in between


class Strict(BaseModel):
    """No type is made of another one: `"5"` and `true` are no numbers. Fields that nobody knows are tolerated."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a body. RequestError 400, or 413 if Python would need too long for what is in it."""
    check_number_of_values(data)
    try:
        value = from_json(data, cache_strings="keys")  # by default it keeps what clients wrote, too, for the next who writes the same
    except ValueError as error:
        is_deep = str(error).startswith("recursion limit")
        words = "The request body is nested too deeply." if is_deep else "The request body is not valid JSON."
        raise RequestError(400, words) from None
    if not isinstance(value, dict):
        raise RequestError(400, "The request body must be a JSON object.")
    return value


def check_number_of_values(data: bytes) -> None:
    """RequestError 413 for more lists, objects and members than any request has: while they are made, nothing else happens in this
    process. Brackets within strings are no lists; those are looked for only in a body that has many brackets."""
    if _num_values(data) <= MAX_VALUES:
        return
    num_values = position = 0
    while (block := STRINGS.match(data, position)) is not None:
        num_values += _num_values(STRING.sub(b"", block[0]))
        position = block.end()
        if num_values > MAX_VALUES:
            break
    if num_values + _num_values(data[position:]) > MAX_VALUES:
        raise RequestError(413, f"The request has more than {MAX_VALUES} lists, objects and members.")


def _num_values(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{") + data.count(b":")


def check(model: type[Model], value: dict[str, Any]) -> Model:
    """RequestError 400 names the first bad field; `param` is its path, such as `messages.0.content`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _bad_value(error.errors(include_url=False, include_input=False)[0]) from None


def bad_value(name: str, words: str) -> RequestError:
    """A value that no schema can refuse."""
    return RequestError(400, f"{name}: {words}", name, "invalid_value")


def _bad_value(details: ErrorDetails) -> RequestError:
    words = WORDS.get(details["type"], details["msg"]).format(**details.get("ctx", {}))
    return bad_value(_field_name(details["loc"]), words)


def _field_name(location: tuple[int | str, ...]) -> str:
    """Steps in angle brackets are ways through a union, not fields."""
    return ".".join(str(step)[:64] for step in location if not str(step).startswith("<")) or "body"
