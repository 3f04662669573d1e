"""JSON to checked requests, and every mistake in it to a 400 in our own words that names the field."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema, from_json

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
# OpenAI's `code` by the same; a number's begins with its kind.
CODES = {
    "missing": "missing_required_parameter", "extra_forbidden": "unsupported_parameter", "none_required": "unsupported_parameter",
    "int_type": "invalid_type", "float_type": "invalid_type", "bool_type": "invalid_type", "string_type": "invalid_type",
    "list_type": "invalid_type", "dict_type": "invalid_type", "model_type": "invalid_type", "greater_than": "below_min_value",
    "greater_than_equal": "below_min_value", "less_than": "above_max_value", "less_than_equal": "above_max_value",
    "too_short": "array_below_min_length", "too_long": "array_above_max_length", "string_too_short": "string_below_min_length",
    "string_too_long": "string_above_max_length",
}  # fmt: skip
INDEX = re.compile(r"\.(\d+)(?=\.|$)")
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
STRINGS = re.compile(rb'(?:[^"]*+"(?:[^"\\]++|\\.)*+"){1,4096}', re.DOTALL)  # at once: other threads run in between


def _without_defaults(schema: dict[str, Any]) -> None:
    """Generators of clients take such a field for one that must be there."""
    for field in schema.get("properties", {}).values():
        field.pop("default", None)


class Strict(BaseModel):
    """No type is made of another one: `"5"` and `true` are no numbers. Fields that nobody knows are tolerated."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, json_schema_extra=_without_defaults)


class Open(Strict):
    """Fields that it lacks are in `model_extra`."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class Worded:
    """Stands beside a type: whatever is wrong with a value is said in these words."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(handler(source), "worded", custom_error_message=self.words)


ONE_OF = "one_of"


@dataclass(frozen=True)
class OneOf:
    """Stands beside a union: a value's kind of JSON, of an object its `type`, chooses the member that judges it. What fits none is refused
    in these words, and with the type that it has; without words it is judged as a text."""

    words: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = {f"<{kind}>": handler.generate_schema(member) for member in get_args(source) for kind in _kinds(member)}

        known = {tag: tag for tag in members}.get
        otherwise = None if self.words else "<text>"

        def choose(value: object) -> str | None:
            first = second = "<null>" if value is None else "<text>"
            value = vars(value) if isinstance(value, BaseModel) else value  # when it is written
            if isinstance(value, dict):
                first, second = f"<type {value.get('type')}>", "<object>"
            elif isinstance(value, list):
                first, second = ("<numbers>", "<list>") if value and type(value[0]) is int else ("<list>", "<numbers>")
            return known(first) or known(second) or otherwise

        error: dict[str, Any] = {"custom_error_type": ONE_OF, "custom_error_message": self.words} if self.words else {}
        return core_schema.tagged_union_schema(members, choose, **error)


def _kinds(member: Any) -> Iterator[str]:
    bare = _bare(member)
    if get_origin(bare) is list:
        yield "numbers" if _bare(get_args(bare)[0]) is int else "list"
    elif isinstance(bare, type) and issubclass(bare, BaseModel) and "type" in bare.model_fields:
        field = bare.model_fields["type"]
        kinds = [*get_args(field.annotation), *(() if field.is_required() else (None,))]
        yield from (f"type {kind}" for kind in kinds)
        if not kinds:  # of any type that no other member has
            yield "object"
    else:
        yield {str: "text", type(None): "null"}.get(bare, "object")


def _bare(member: Any) -> Any:
    return get_args(member)[0] if get_origin(member) is Annotated else member


Model = TypeVar("Model", bound=BaseModel)


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a body. RequestError 400, or 413 if Python would need too long for what is in it."""
    check_number_of_values(data)
    try:
        value = from_json(data, cache_strings="keys")  # by default it keeps values too
    except ValueError as error:
        is_deep = str(error).startswith("recursion limit")
        words = "The request body is nested too deeply." if is_deep else "The request body is not valid JSON."
        raise RequestError(400, words) from None
    if not isinstance(value, dict):
        raise RequestError(400, "The request body must be a JSON object.")
    return value


def check_number_of_values(data: bytes) -> None:
    """RequestError 413 for more lists, objects and members than any request has: while they are made, nothing else happens here. Brackets
    within strings do not count; strings are looked for only in a body that has many brackets."""
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
    """RequestError 400 names the first bad field; `param` is its path, such as `messages[0].content`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _bad_value(error.errors(include_url=False)[0]) from None


def bad_value(name: str, words: str, code: str = "invalid_value") -> RequestError:
    """A value that no schema can refuse; `messages.0.role` is `messages[0].role`, as OpenAI writes it."""
    name = INDEX.sub(r"[\1]", name)
    return RequestError(400, f"{name}: {words}", name, code)


def _bad_value(details: ErrorDetails) -> RequestError:
    known = WORDS.get(details["type"])
    words = details["msg"] if known is None else known.format(**details.get("ctx", {}))
    value, code = details["input"], CODES.get(details["type"], "invalid_value")
    if details["type"] == ONE_OF and isinstance(value, dict) and isinstance(value.get("type"), str):
        words = f"{words}, not '{value['type'][:64]}'"
    if code in ("below_min_value", "above_max_value"):
        code = f"{'integer' if isinstance(value, int) else 'decimal'}_{code}"
    name = _field_name(details["loc"])
    return RequestError(400, f"{name}: {words}", name, code)


def _field_name(location: tuple[int | str, ...]) -> str:
    """Steps in angle brackets are ways through a union, not fields."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in location if not str(step).startswith("<")]
    return "".join(steps).removeprefix(".") or "body"
