"""Validation of JSON bodies by the types of requests. An error is HTTP 400 with pydantic's text and the path of the field. Of fields that
the types do not have, those of REFUSED would change the answer; all others are ignored."""

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, ValidationError
from pydantic_core import ErrorDetails, from_json

from server.errors import RequestError

INVALID, UNSUPPORTED = "invalid_value", "unsupported_parameter"
CODES = {"missing": "missing_required_parameter", "extra_forbidden": UNSUPPORTED}  # OpenAI's, by pydantic's type of the error
MAX_VALUES = 500_000  # more than the text of the largest context has
MAX_SHOWN = 64  # characters of a name that the client chose
INDEX = re.compile(r"\.(\d+)(?=\.|$)")
BY_TYPE = Discriminator("type")

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


def read_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. RequestError 400, or 413: parsing millions of values would block the event loop."""
    if data.count(b"[") + data.count(b"{") + data.count(b":") > MAX_VALUES:
        raise RequestError(413, f"The request has more than {MAX_VALUES} lists, objects and members.")
    try:
        value = from_json(data, cache_strings="keys")  # the default also caches values
    except ValueError as error:
        raise RequestError(400, f"The request body is not valid JSON: {str(error)[:MAX_SHOWN]}") from None
    if not isinstance(value, dict):
        raise RequestError(400, "The request body must be a JSON object.")
    return value


def check(model: type[Model], value: dict[str, Any]) -> Model:
    """Return the validated model. RequestError 400 names a bad field; `param` is its path, such as `messages[0].content`."""
    try:
        return model.model_validate(value)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
    error = max(errors, key=lambda error: len(error["loc"]))  # of a union, the member that fits best
    code = CODES.get(error["type"], "invalid_type" if error["type"].endswith("_type") else INVALID)
    raise bad_value(_path(error, value) or "body", error["msg"][: 8 * MAX_SHOWN], code) from None


def bad_value(name: str, words: str, code: str = INVALID) -> RequestError:
    """Return an error that a schema cannot express; `messages.0.role` becomes `messages[0].role`, as in OpenAI's API."""
    name = INDEX.sub(r"[\1]", name)
    return RequestError(400, f"{name}: {words}", name, code)


def _path(error: ErrorDetails, value: Any) -> str:
    """Return the path of a field. pydantic's location also has the members of unions, which are not found in the value."""
    names, location = list[str](), error["loc"]
    for step, following in zip(location, (*location[1:], None), strict=True):
        is_tag = isinstance(value, dict) and step == value.get("type") and following in value
        is_found = isinstance(step, int) if isinstance(value, list) else isinstance(value, dict) and step in value
        if not is_tag and (is_found or not names or (following is None and error["type"] == "missing")):
            names.append(str(step)[:MAX_SHOWN])
            value = value[step] if is_found else None
    return ".".join(names)


# Fields of other servers that would change the answer.
NAMES = """audio audio_data background chat_template container conversation custom_logit_processor documents echo functions guided_choice
guided_json guided_regex input_embeds input_ids label_token_ids logits_processors lora_path max_pixels media_io_kwargs
min_pixels output_format previous_response_id prompt prompt_embeds return_hidden_states return_tokens_as_token_ids session_params
stop_regex structural_tag suffix thinking token_ids_logprob truncate_prompt_tokens truncation use_beam_search video_data
web_search_options"""
REFUSED = frozenset(NAMES.split())
OFF: tuple[object, ...] = (None, False, [], {}, "disabled")  # their values that mean what this server does


def check_refused(fields: dict[str, Any]) -> None:
    """Raise RequestError 400 for a refused field with another value."""
    for name in fields.keys() & REFUSED:
        if fields[name] not in OFF:
            raise bad_value(name, "this server does not support this field", UNSUPPORTED)
