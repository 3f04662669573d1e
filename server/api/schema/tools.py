"""Tools and calls of chat completions: functions, and tools run by a vendor, which are dropped."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag

from server.api.schema.validate import Open, Strict, tag_of

Name = Annotated[str, Field(min_length=1, max_length=256)]


def check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's parameters. Raises ValueError for one whose `properties` are no schemas."""
    properties = schema.get("properties")
    if properties is not None and not (isinstance(properties, dict) and all(isinstance(one, dict | bool) for one in properties.values())):
        raise ValueError("`properties` must be an object of schemas")
    return schema


Parameters = Annotated[dict[str, Any], AfterValidator(check_parameters)]


class CalledFunction(Strict):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionDefinition(Strict):
    name: Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class HostedTool(Open):
    """A tool that a vendor runs for its own models; this server drops it."""

    type: Annotated[str, Field(json_schema_extra={"not": {"enum": ["function", "custom", "namespace"]}})]


Hosted = Annotated[HostedTool, Tag("other")]
AnyTool = Annotated[Annotated[Tool, Tag("function")] | Hosted, tag_of("function", "custom")]


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedList(Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedList
