"""Validation of JSON bodies. Every error is HTTP 400 with our own text and the name of the field."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema, from_json

from server.errors import RequestError

INVALID, TYPE, UNSUPPORTED = "invalid_value", "invalid_type", "unsupported_parameter"
LEAVE_OUT = "is not supported by this server; leave it out"
# pydantic's error type: our text, with pydantic's context in braces, and OpenAI's code.
WORDS = {
    "missing": ("is missing", "missing_required_parameter"),
    "extra_forbidden": (LEAVE_OUT, UNSUPPORTED), "none_required": (LEAVE_OUT, UNSUPPORTED),
    "int_type": ("must be an integer", TYPE), "float_type": ("must be a number", TYPE), "bool_type": ("must be true or false", TYPE),
    "finite_number": ("must be a finite number", INVALID), "string_type": ("must be a string", TYPE), "list_type": ("must be a list", TYPE),
    "dict_type": ("must be an object", TYPE), "model_type": ("must be an object", TYPE), "literal_error": ("must be {expected}", INVALID),
    "greater_than": ("must be greater than {gt}", "below_min_value"), "greater_than_equal": ("must be at least {ge}", "below_min_value"),
    "less_than": ("must be less than {lt}", "above_max_value"), "less_than_equal": ("must be at most {le}", "above_max_value"),
    "too_short": ("must have at least {min_length} entries", "array_below_min_length"),
    "too_long": ("must have at most {max_length} entries", "array_above_max_length"),
    "string_too_short": ("must have at least {min_length} characters", "string_below_min_length"),
    "string_too_long": ("must have at most {max_length} characters", "string_above_max_length"),
    "string_unicode": ("must be valid Unicode", INVALID), "value_error": ("{error}", INVALID),
}  # fmt: skip
ONE_OF = "one_of"
MAX_VALUES = 200_000  # enough for 10,000 messages of several parts, or a thousand large tools
INDEX = re.compile(r"\.(\d+)(?=\.|$)")
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
BLOCK = re.compile(rb'(?:[^"]*+"(?:[^"\\]++|\\.)*+"){1,4096}|.+', re.DOTALL)  # at most 4,096 strings: other threads run in between

Model = TypeVar("Model", bound=BaseModel)


def _without_defaults(schema: dict[str, Any]) -> None:
    """Remove the defaults: client generators treat a field with a default as required."""
    for field in schema.get("properties", {}).values():
        field.pop("default", None)


class Strict(BaseModel):
    """Base of requests. Values are not converted (`"5"` and `true` are not numbers); unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, json_schema_extra=_without_defaults)


class Open(Strict):
    """A request that keeps its unknown fields in `model_extra`."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class Worded:
    """Annotation of a type: this text replaces every error of its values."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(handler(source), "worded", custom_error_message=self.words)


@dataclass(frozen=True)
class OneOf:
    """Annotation of a union: a value's JSON type, and the `type` of an object, select the member that validates it. A value without a
    member is rejected with this text, followed by its `type`; without a text, it is validated as a string."""

    words: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = {kind: handler.generate_schema(member) for member in get_args(source) for kind in _kinds(member)}

        def choose(value: object) -> str | None:
            value = vars(value) if isinstance(value, BaseModel) else value  # serialisation passes models
            kinds = ["<null>" if value is None else "<text>"]
            if isinstance(value, dict):
                kinds = [f"<type {value.get('type')}>", "<object>"]
            elif isinstance(value, list):
                kinds = ["<list>", "<numbers>"][:: -1 if value and type(value[0]) is int else 1]
            return next((kind for kind in kinds if kind in members), None if self.words else "<text>")

        error: dict[str, Any] = {"custom_error_type": ONE_OF, "custom_error_message": self.words} if self.words else {}
        return core_schema.tagged_union_schema(members, choose, **error)


def _kinds(member: Any) -> Iterator[str]:
    bare = _bare(member)
    if get_origin(bare) is list:
        yield "<numbers>" if _bare(get_args(bare)[0]) is int else "<list>"
    elif isinstance(bare, type) and issubclass(bare, BaseModel) and "type" in bare.model_fields:
        field = bare.model_fields["type"]
        kinds = [*get_args(field.annotation), *(() if field.is_required() else (None,))]
        yield from (f"<type {kind}>" for kind in kinds) if kinds else ("<object>",)  # any type that no other member has
    else:
        yield {str: "<text>", type(None): "<null>"}.get(bare, "<object>")


def _bare(member: Any) -> Any:
    return get_args(member)[0] if get_origin(member) is Annotated else member


def read_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. RequestError 400, or 413 as in `check_number_of_values`."""
    check_number_of_values(data)
    try:
        value = from_json(data, cache_strings="keys")  # the default also caches values
    except ValueError as error:
        words = "nested too deeply" if str(error).startswith("recursion limit") else "not valid JSON"
        raise RequestError(400, f"The request body is {words}.") from None
    if not isinstance(value, dict):
        raise RequestError(400, "The request body must be a JSON object.")
    return value


def check_number_of_values(data: bytes) -> None:
    """Raise RequestError 413 for more than MAX_VALUES lists, objects and members, whose parsing would block the event loop. Brackets in
    strings do not count."""
    num_values = 0
    for block in BLOCK.finditer(data) if _num_values(data) > MAX_VALUES else ():
        num_values += _num_values(STRING.sub(b"", block[0]))
        if num_values > MAX_VALUES:
            raise RequestError(413, f"The request has more than {MAX_VALUES} lists, objects and members.")


def _num_values(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{") + data.count(b":")


def check(model: type[Model], value: dict[str, Any]) -> Model:
    """Return the validated model. RequestError 400 names the first bad field; `param` is its path, such as `messages[0].content`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _bad_value(error.errors(include_url=False)[0]) from None


def bad_value(name: str, words: str, code: str = INVALID) -> RequestError:
    """Return an error that a schema cannot express; `messages.0.role` becomes `messages[0].role`, as in OpenAI's API."""
    name = INDEX.sub(r"[\1]", name)
    return RequestError(400, f"{name}: {words}", name, code)


def _bad_value(details: ErrorDetails) -> RequestError:
    words, code = WORDS.get(details["type"], (None, INVALID))
    words = details["msg"] if words is None else words.format(**details.get("ctx", {}))
    value = details["input"]
    if details["type"] == ONE_OF and isinstance(value, dict) and isinstance(value.get("type"), str):
        words = f"{words}, not '{value['type'][:64]}'"
    if code in ("below_min_value", "above_max_value"):
        code = f"{'integer' if isinstance(value, int) else 'decimal'}_{code}"
    # Entries in angle brackets select a member of a union; they are not fields.
    steps = [f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in details["loc"] if not str(step).startswith("<")]
    name = "".join(steps).removeprefix(".") or "body"
    return RequestError(400, f"{name}: {words}", name, code)
