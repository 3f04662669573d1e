"""Tools and calls of chat completions: functions, custom tools, which take one text, and tools run by a vendor, which are dropped."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag

from server.api.schema.validate import Open, Strict, tag_of

Name = Annotated[str, Field(min_length=1, max_length=256)]
CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False,
}  # fmt: skip


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


class CustomInput(Strict):
    name: str
    input: str


class CustomCall(Strict):
    id: str | None = None
    type: Literal["custom"]
    custom: CustomInput


class FunctionDefinition(Strict):
    name: Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class TextGrammar(Strict):
    syntax: str
    definition: str


class TextShape(Strict):
    type: Literal["text", "grammar"]
    grammar: TextGrammar | None = None


class CustomDefinition(Strict):
    name: Name
    description: str | None = None
    format: TextShape | None = None


class CustomTool(Strict):
    type: Literal["custom"]
    custom: CustomDefinition

    def as_function(self) -> Tool:
        """Return a function with one text parameter. A grammar is described to the model but not enforced."""
        custom, words = self.custom, [self.custom.description] if self.custom.description else []
        if custom.format is not None and custom.format.grammar is not None:
            words.append(f"The input follows this {custom.format.grammar.syntax} grammar:\n{custom.format.grammar.definition}")
        description = "\n\n".join(words) or None
        function = FunctionDefinition(name=custom.name, description=description, parameters=CUSTOM_PARAMETERS, strict=True)
        return Tool(type="function", function=function)


def custom_text(arguments: str) -> str:
    """Return the text in a custom tool's arguments; arguments of another form, such as truncated ones, are returned unchanged."""
    try:
        text = json.loads(arguments, strict=False)["input"]
    except (ValueError, RecursionError, TypeError, LookupError):
        return arguments
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else arguments  # an unpaired surrogate cannot be sent


class HostedTool(Open):
    """A tool that a vendor runs for its own models; this server drops it."""

    type: Annotated[str, Field(json_schema_extra={"not": {"enum": ["function", "custom", "namespace"]}})]


Hosted = Annotated[HostedTool, Tag("other")]
AnyTool = Annotated[Annotated[Tool, Tag("function")] | Annotated[CustomTool, Tag("custom")] | Hosted, tag_of("function", "custom")]


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"] = "function"
    function: FunctionName


class NamedCustom(Strict):
    type: Literal["custom"]
    custom: FunctionName


class AllowedList(Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedTool | NamedCustom]


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


def name_of(tool: object) -> str | None:
    """Return the name of a tool or of a choice; None for others."""
    if isinstance(tool, Tool | NamedTool):
        return tool.function.name
    return tool.custom.name if isinstance(tool, CustomTool | NamedCustom) else None
