"""Schema of chat and text completions: the supported fields as strict types. The other dialects build on it.

None means the checkpoint's default. `validate.py` handles all other fields.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model

from engine.wire.params import MAX_TOP_LOGPROBS, PARAMETERS, NumLogprobs, OutputOptions, TokenCount, TokenId
from server.api.schema.formats import GrammarFields
from server.api.schema.parts import FIRST, MediaOptions, Message, NamedTool, Tool, ToolList, client_tools
from server.api.schema.validate import Open, Strict, bad_value, check_refused

MAX_MESSAGES = 10_000
MAX_STOPS, MAX_STOP_CHARACTERS = 32, 128  # every token is compared with all of them
MAX_VARIABLES = 64  # in chat_template_kwargs
MAX_TIMEOUT_S = 86_400
MAX_PROMPTS, MAX_ANSWERS = 128, 16
DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
# Reasoning efforts of all dialects, and whether thinking is on: templates have a switch, not levels.
EFFORTS = {"none": False, "minimal": False, "low": True, "medium": True, "high": True, "xhigh": True, "max": True}

MessageList = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)

MAX_IDS = 1 << 20  # prompts per request
Salt = Annotated[str, Field(max_length=1024)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Reasoning(Strict):
    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None


def _stop_list(value: object) -> object:
    return [] if value is None else [value] if isinstance(value, str) else value


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopList = Annotated[list[StopText], Field(max_length=MAX_STOPS)]
Stop = Annotated[StopList, BeforeValidator(_stop_list, json_schema_input_type=StopText | StopList | None)]
Ids = Annotated[list[int], FIRST]
AnyIds = Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True)]


class AnyRequest(Open):
    model: str | None = None
    cache_salt: Salt | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None

    def check_together(self, vocab_size: int) -> None:
        """Check fields against each other and against the vocabulary, and unsupported fields. RequestError 400."""
        check_refused(self.model_extra or {})


class MediaRequest(MediaOptions, AnyRequest):
    """Fields of requests with conversations."""


LISTED: dict[str, Any] = {name: (parameter.json | None, None) for name, parameter in PARAMETERS.items()}
ListedFields: Any = create_model("ListedFields", __base__=AnyRequest, **LISTED)


class GenerationRequest(GrammarFields, ListedFields):
    """Fields of chat and text completions: those of grammars, those of the table `SamplingParams`, and these."""

    stop: Stop = Field(default=[])
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timings: bool | None = None
    include_reasoning: bool | None = None
    return_token_ids: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report per token; None: no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return MAX_TOP_LOGPROBS if self.prompt_logprobs == -1 else self.prompt_logprobs

    @property
    def derived(self) -> dict[str, Any]:
        return {"max_tokens": self.token_limit, "prompt_logprobs": self.num_prompt_logprobs, "logprobs": self.num_logprobs}

    def output_options(self, **others: Any) -> OutputOptions:
        return OutputOptions(
            stop=self.stop, min_tokens=self.min_tokens or 0, bad_words=self.bad_words or [],
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False, token_ids=bool(self.return_token_ids),
            prompt_logprobs=self.prompt_logprobs is not None, **others,
        )  # fmt: skip

    def check_together(self, vocab_size: int) -> None:
        super().check_together(vocab_size)
        for field, ids in (("stop_token_ids", self.stop_token_ids), ("allowed_token_ids", self.allowed_token_ids)):
            for i, token_id in enumerate(ids or ()):
                if token_id >= vocab_size:
                    raise bad_value(f"{field}.{i}", f"must be less than {vocab_size}, the size of the vocabulary")
        for name in self.logit_bias or ():
            if not (name.isascii() and name.isdigit() and int(name) < vocab_size):
                raise bad_value("logit_bias", f"'{name[:64]}' is not a token id below {vocab_size}")
        if self.token_limit is not None and (self.min_tokens or 0) > self.token_limit:
            raise bad_value("min_tokens", "must not exceed the maximum number of tokens")
        if self.stream and self.prompt_logprobs is not None:
            raise bad_value("prompt_logprobs", "is for requests without `stream: true`")


class ChatRequest(GenerationRequest, MediaRequest):
    messages: Annotated[list[Message], MessageList]
    max_completion_tokens: TokenCount | None = None
    tools: Annotated[list[Tool], ToolList, client_tools(Tool, "function", None)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    enable_thinking: bool | None = None  # clients send it here, too, instead of in chat_template_kwargs
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def derived(self) -> dict[str, Any]:
        budget = self.reasoning.max_tokens if self.reasoning and self.thinking_token_budget is None else self.thinking_token_budget
        return super().derived | {"thinking_token_budget": budget}

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Return the template's variables. `chat_template_kwargs` take precedence over `enable_thinking`, which takes precedence over the
        effort."""
        effort = self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)
        by_effort = None if effort is None else EFFORTS[effort]
        thinks = by_effort if self.enable_thinking is None else self.enable_thinking
        return ({} if thinks is None else {"enable_thinking": thinks}) | (self.chat_template_kwargs or {})

    @property
    def functions(self) -> list[Tool]:
        return self.tools or []

    @property
    def called(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def uses_tools(self) -> bool:
        return bool(self.functions) and self.tool_choice != "none"

    def check_together(self, vocab_size: int) -> None:
        super().check_together(vocab_size)
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise bad_value("continue_final_message", "excludes `add_generation_prompt: true`")
            if self.messages[-1].role != "assistant" or not self.messages[-1].content:
                raise bad_value("continue_final_message", "needs a last message of role 'assistant' with content")
        if self.top_logprobs and not self.logprobs:
            raise bad_value("top_logprobs", "is for requests with `logprobs: true` only")
        names = [tool.function.name for tool in self.functions]
        if len(set(names)) < len(names):
            raise bad_value("tools", "must have unique names")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise bad_value("tool_choice", "needs tools")
        if self.called not in (None, *names):
            raise bad_value("tool_choice", "names a function that is not among the tools")


def prompts_of(value: Any) -> list[Any]:
    """Return the entries of a list of texts or of lists of token ids, or the only prompt."""
    return list(value) if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]


def check_ids(prompts: list[Any], field: str, vocab_size: int) -> None:
    """Raise RequestError 400 for token ids outside of the vocabulary. Texts are skipped."""
    if any(min(ids) < 0 or max(ids) >= vocab_size for ids in prompts if ids and isinstance(ids, list)):
        raise bad_value(field, f"holds token ids outside of the vocabulary of {vocab_size}")


def check_prompts(prompts: list[Any], field: str, vocab_size: int) -> None:
    """Raise RequestError 400 for too many or empty prompts, and for token ids outside of the vocabulary."""
    if len(prompts) > MAX_PROMPTS:
        raise bad_value(field, f"must have at most {MAX_PROMPTS} entries")
    if not all(prompts):
        raise bad_value(field, "must not be empty")
    check_ids(prompts, field, vocab_size)


class CompletionRequest(GenerationRequest):
    prompt: str | Ids | Annotated[list[str | Ids], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None  # 0: only the prompt's echo and log-probabilities
    echo: bool | None = None
    logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [super().num_prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)

    @property
    def token_limit(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[Any]:
        return prompts_of(self.prompt)

    def check_together(self, vocab_size: int) -> None:
        super().check_together(vocab_size)
        check_prompts(self.prompts, "prompt", vocab_size)
