"""Rendering of messages by a chat template: the checkpoint's, or that of `--chat-template`.

Text of a user never becomes a control token or an image placeholder: before the template runs, each special token in a text (and the
beginning of one at its end) is replaced by a marker with a private nonce. So all special tokens of the rendered text come from the
template."""

import json
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.wire.params import ChatPrompt
from server.errors import PROMPT, RequestError

MAX_REASON = 200
NONCE_CHARACTERS = 34
FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, SyntaxError)


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    originals: dict[str, str]

    def reveal(self, piece: str) -> str:
        """Return a piece of the original text. Unknown markers, which only the template can have written, are text."""
        nonce = next(iter(self.originals))[:NONCE_CHARACTERS]
        return re.sub(f"{nonce}[0-9]+x", lambda match: self.originals.get(match[0], match[0]), piece)


class ChatTemplate:
    """Compiled template, for several threads. Raises ValueError. `variables`: special tokens and defaults. `joins_parts`: join the texts of
    a message with line breaks, since templates of text models do not accept parts."""

    def __init__(self, source: str, special_tokens: list[str], variables: dict[str, Any], joins_parts: bool):
        self.source = source
        self._variables = variables
        self._joins_parts = joins_parts
        self.special = re.compile("|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True)))
        self._beginnings = {token[:length] for token in special_tokens for length in range(1, len(token))}
        self._longest_beginning = max(map(len, self._beginnings))
        try:
            self._template = _environment().from_string(source)
        except FAILURES as error:
            place = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            raise ValueError(f"the chat template cannot be compiled: {str(error)[:MAX_REASON]}{place}") from None

    def render(self, prompt: ChatPrompt) -> Rendered:
        """RequestError 400 if the template rejects the messages or omits requested parts."""
        shield = _Shield()
        messages = [self._protect_message(message, shield) for message in msgspec.json.decode(prompt.messages)]
        tools = None if prompt.tools is None else self._protect(msgspec.json.decode(prompt.tools), shield)
        if tools is not None and "tools" not in self.source:
            raise RequestError(400, "tools: the chat template does not render tools.", "tools", "unsupported_value")
        if prompt.ending == "continue":
            _append_text(messages[-1], shield.end)
        given = {name: self._protect(value, shield) for name, value in prompt.template_kwargs.items()}
        fixed = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt.ending == "generation"}
        text = self._run({**self._variables, **given, **fixed})
        if prompt.ending == "continue":
            text, found, _ = text.rpartition(shield.end)
            if not found:
                words = "The chat template does not render the last message unchanged."
                raise RequestError(400, words, "continue_final_message", "unsupported_value")
        return Rendered(text, shield.originals)

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except FAILURES as error:
            words = str(error)[:MAX_REASON] if type(error) is TemplateError else "it raised an error"
            raise RequestError(400, f"The chat template refuses these messages: {words}", PROMPT) from None

    def _protect_message(self, message: dict[str, object], shield: "_Shield") -> dict[str, object]:
        content = message["content"]
        if isinstance(content, list) and self._joins_parts:
            content = "\n".join(part.get("text", "") for part in content)
        if isinstance(content, list):
            content = [self._protect(part, shield) if part["type"] == "text" else _medium(part["type"]) for part in content]
        else:
            content = self._protect_text(str(content), shield)
        return {name: content if name == "content" else self._protect(value, shield) for name, value in message.items()}

    def _protect(self, value: object, shield: "_Shield") -> object:
        """Protect every text in a JSON value, including names of members."""
        if isinstance(value, str):
            return self._protect_text(value, shield)
        if isinstance(value, list):
            return [self._protect(entry, shield) for entry in value]
        if isinstance(value, dict):
            return {self._protect_text(name, shield): self._protect(entry, shield) for name, entry in value.items()}
        return value

    def _protect_text(self, text: str, shield: "_Shield") -> str:
        """Replace special tokens, and an end that the following text might complete to one."""
        text = self.special.sub(lambda match: shield.hide(match[0]), text)
        for length in range(min(len(text), self._longest_beginning), 0, -1):
            if text[-length:] in self._beginnings:
                return text[:-length] + shield.hide(text[-length:])
        return text


class _Shield:
    """Texts of one request, replaced by markers that clients cannot predict."""

    def __init__(self) -> None:
        self.originals: dict[str, str] = {}  # by marker
        self._nonce = f"x{secrets.token_hex(NONCE_CHARACTERS // 2 - 1)}x"
        self.end = f"{self._nonce}end"  # marks the end of a message to continue

    def hide(self, text: str) -> str:
        marker = f"{self._nonce}{len(self.originals)}x"
        self.originals[marker] = text
        return marker


def _medium(kind: str) -> dict[str, str]:
    """Return the part of a medium; its text is for templates that accept media only from users."""
    return {"type": kind, kind: "", "text": f"<|vision_start|><|{kind}_pad|><|vision_end|>"}


def _append_text(message: dict[str, object], text: str) -> None:
    content = message["content"]
    message["content"] = [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content}{text}"


class _Generation(Extension):
    """`{% generation %}` renders its body; in training it marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment in which transformers renders chat templates."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    # Without Jinja's escaping of HTML characters.
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(value, ensure_ascii=ensure_ascii, **options)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
