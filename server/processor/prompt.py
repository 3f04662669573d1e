"""Messages to token ids: chat template, special tokens, placeholders.

What a user typed never becomes a control token or an image slot. A text that contains (or ends like the beginning of) a special token gets
a marker with a private nonce in its place before the template runs; afterwards the rendered text is cut at its special tokens, which are
then all the template's own, and the markers in the pieces between become text again.
"""

import json
import re
import secrets
from array import array
from collections.abc import Sequence
from datetime import datetime

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine.messages import ChatPrompt, TextPrompt, TokenPrompt
from engine.params import MAX_BAD_WORD_TOKENS
from server.checkpoint import Checkpoint
from server.errors import PROMPT, RequestError

Prompt = ChatPrompt | TextPrompt | TokenPrompt
Messages = list[dict[str, object]]

# Shown by templates that look for text in every role's parts but for images only in a user's.
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"

MAX_TOKENS = 1 << 20  # of a prompt that is only counted
USUAL_CHARACTERS = 6  # of a token: texts have fewer
PIECE_CHARACTERS = 1 << 14
MARGIN = 0.1


def too_long(limit: int, num_tokens: str) -> RequestError:
    """Of a prompt that leaves no room for an answer."""
    # In words that client libraries look for.
    maximum = f"This model's maximum context length is {limit} tokens, answer included."
    words = f"{maximum} However, your prompt is too long: it has {num_tokens} tokens. Please reduce its length."
    return RequestError(400, words, PROMPT, "context_length_exceeded")


class ExpandedPrompt:
    """int32 ids with every image's placeholder repeated; `starts[i]` is where image i begins."""

    def __init__(self, ids: Sequence[int], image_token_id: int, lengths: Sequence[int]):
        self.ids = array("i")
        self.starts: list[int] = []
        position = 0
        for length in lengths:
            slot = ids.index(image_token_id, position)
            self.ids.extend(ids[position:slot])
            self.starts.append(len(self.ids))
            self.ids.extend(array("i", [image_token_id]) * length)
            position = slot + 1
        self.ids.extend(ids[position:])


class PromptBuilder:
    """The checkpoint's tokenizer and chat template. Stateless between calls; may be used from several threads."""

    def __init__(self, checkpoint: Checkpoint):
        self.tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_file))
        self._literal = Tokenizer.from_file(str(checkpoint.tokenizer_file))
        self._literal.encode_special_tokens = True  # special tokens in its input are text
        self._image_token_id = checkpoint.image_token_id
        self._special_variables = checkpoint.special_tokens
        self.template = checkpoint.chat_template
        self._template = _environment().from_string(checkpoint.chat_template)
        self._frame = _frame_of(self.tokenizer)
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._special = re.compile("|".join(re.escape(token) for token in sorted(self._special_ids, key=len, reverse=True)))
        self._beginnings = {token[:length] for token in self._special_ids for length in range(1, len(token))}
        self._longest_beginning = max(map(len, self._beginnings))

    def size(self, prompt: Prompt) -> int:
        """What says how long `encode` takes: bytes of JSON or text."""
        if isinstance(prompt, ChatPrompt):
            return len(prompt.messages) + len(prompt.tools or b"")
        return len(prompt.text) if isinstance(prompt, TextPrompt) else 0

    def encode(self, prompt: Prompt, num_images: int, limit: int = MAX_TOKENS, is_framed: bool = False) -> list[int]:
        """Ids with one placeholder per image; `is_framed`: within the tokens that the tokenizer puts around a text, if any. RequestError
        400 if the template refuses the messages or does not show every image, or, in a fraction of the time and memory, for a text of far
        more tokens than `limit`; how many ids there are is the caller's business."""
        if isinstance(prompt, ChatPrompt):
            ids = self._encode_chat(prompt, limit)
        elif isinstance(prompt, TokenPrompt):
            ids = prompt.ids
        else:
            self._check_size(prompt.text, limit)
            ids = self._encode_text(prompt.text)
        is_chat = isinstance(prompt, ChatPrompt)
        num_shown = ids.count(self._image_token_id)
        if num_shown > num_images and not is_chat:
            raise RequestError(400, "The prompt holds the placeholder of an image, which only messages can bring.", PROMPT, "invalid_value")
        if num_shown != num_images:
            raise RequestError(400, "The chat template of this model does not show every image of these messages.", PROMPT)
        return [*self._frame[0], *ids, *self._frame[1]] if is_framed and is_chat else ids

    def first_tokens(self, words: list[str]) -> tuple[int, ...]:
        """Of each word. They are whole words in vocabularies as large as Qwen's."""
        return tuple(self._literal.encode(word, add_special_tokens=False).ids[0] for word in words)

    def bad_words(self, texts: list[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word, as it is and behind a space. RequestError 400 for one that is too long."""
        found: dict[tuple[int, ...], None] = {}
        for bad in texts:
            for text in (bad, " " + bad.lstrip()):
                ids = tuple(self._literal.encode(text, add_special_tokens=False).ids)
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    words = f"bad_words: a word may have {MAX_BAD_WORD_TOKENS} tokens at most."
                    raise RequestError(400, words, "bad_words", "invalid_value")
                found[ids] = None
        return tuple(found)

    def text_of(self, prompt: Prompt) -> str:
        """A completion's prompt as the client would read it."""
        if isinstance(prompt, TokenPrompt):
            return str(self.tokenizer.decode(prompt.ids, skip_special_tokens=False))
        return prompt.text if isinstance(prompt, TextPrompt) else ""

    def _check_size(self, text: str, limit: int) -> None:
        """RequestError 400 as soon as pieces of a text that is longer than prompts are have more tokens than it may have; where it is cut
        into them, a few tokens may become some more."""
        if len(text) <= limit * USUAL_CHARACTERS:
            return
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            num_tokens += len(self._encode_text(text[start : start + PIECE_CHARACTERS]))
            if num_tokens > limit * (1 + MARGIN):
                raise too_long(limit, f"more than {limit}")

    def _encode_chat(self, prompt: ChatPrompt, limit: int) -> list[int]:
        shield = _Shield()
        messages = [self._protect(message, shield) for message in msgspec.json.decode(prompt.messages)]
        tools = None if prompt.tools is None else self._protect_value(msgspec.json.decode(prompt.tools), shield)
        if tools is not None and "tools" not in self.template:
            raise RequestError(400, "tools: the chat template of this model does not show tools.", "tools", "unsupported_value")
        if prompt.ending == "continue":
            _append_text(messages[-1], shield.end)
        rendered = self._render(messages, tools, prompt.ending == "generation", prompt.template_kwargs)
        if prompt.ending == "continue":
            rendered, found, _ = rendered.rpartition(shield.end)
            if not found:
                words = "The chat template of this model does not show the last message as it is."
                raise RequestError(400, words, "continue_final_message", "unsupported_value")
        self._check_size(rendered, limit)
        return self._encode_pieces(rendered, shield) if shield.originals else self._encode_text(rendered)

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def expand(self, ids: Sequence[int], lengths: Sequence[int]) -> ExpandedPrompt:
        """Repeats the placeholder of image i `lengths[i]` times."""
        return ExpandedPrompt(ids, self._image_token_id, lengths)

    def _render(self, messages: Messages, tools: object, begins_answer: bool, template_kwargs: dict[str, bool]) -> str:
        try:
            variables = {**self._special_variables, **template_kwargs}
            return self._template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=begins_answer, **variables)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            words = str(error)[:200] if type(error) is TemplateError else "it failed on them"
            raise RequestError(400, f"The chat template of this model refuses these messages: {words}", PROMPT) from None

    def _protect(self, message: dict[str, object], shield: "_Shield") -> dict[str, object]:
        content = message["content"]
        if isinstance(content, list):
            content = [self._protect_part(part, shield) for part in content]
        else:
            content = self._protect_text(str(content), shield)
        protected = {**message, "content": content}
        if "reasoning_content" in message:
            protected["reasoning_content"] = self._protect_text(str(message["reasoning_content"]), shield)
        if "tool_calls" in message:
            protected["tool_calls"] = self._protect_value(message["tool_calls"], shield)
        return protected

    def _protect_value(self, value: object, shield: "_Shield") -> object:
        """Every text in a JSON value, names of members included."""
        if isinstance(value, str):
            return self._protect_text(value, shield)
        if isinstance(value, list):
            return [self._protect_value(entry, shield) for entry in value]
        if isinstance(value, dict):
            return {self._protect_text(name, shield): self._protect_value(entry, shield) for name, entry in value.items()}
        return value

    def _protect_part(self, part: dict[str, object], shield: "_Shield") -> dict[str, object]:
        if part["type"] == "image":
            return {"type": "image", "image": "", "text": IMAGE_TEXT}
        return {**part, "text": self._protect_text(str(part["text"]), shield)}

    def _protect_text(self, text: str, shield: "_Shield") -> str:
        """Markers for whole special tokens, and for the end of a text that the text after it might complete to one."""
        text = self._special.sub(lambda match: shield.hide(match[0]), text)
        for length in range(min(len(text), self._longest_beginning), 0, -1):
            if text[-length:] in self._beginnings:
                return text[:-length] + shield.hide(text[-length:])
        return text

    def _encode_pieces(self, rendered: str, shield: "_Shield") -> list[int]:
        pieces = self._special.split(rendered)
        tokens = self._special.findall(rendered)
        encodings = self._literal.encode_batch_fast([shield.reveal(piece) for piece in pieces], add_special_tokens=False)
        ids: list[int] = list(encodings[0].ids)
        for token, encoding in zip(tokens, encodings[1:], strict=True):
            ids.append(self._special_ids[token])
            ids.extend(encoding.ids)
        return ids


def _frame_of(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer's own post-processor puts before and behind a text."""
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    framed: list[int] = tokenizer.encode("a").ids
    start = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
    return framed[:start], framed[start + len(bare) :]


class _Shield:
    """The texts of one request that are hidden from the template, behind markers that no client can know."""

    def __init__(self) -> None:
        self.originals: list[str] = []
        self._nonce = f"x{secrets.token_hex(16)}x"
        self.end = f"{self._nonce}end"  # of a message that is to be continued

    def hide(self, text: str) -> str:
        self.originals.append(text)
        return f"{self._nonce}{len(self.originals) - 1}x"

    def reveal(self, text: str) -> str:
        return re.sub(f"{self._nonce}([0-9]+)x", lambda match: self.originals[int(match[1])], text)


def _append_text(message: dict[str, object], text: str) -> None:
    content = message["content"]
    message["content"] = [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content}{text}"


class _Generation(Extension):
    """`{% generation %}` marks, for training, what the assistant says; it shows its body."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment in which transformers renders chat templates."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without Jinja's escaping of HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
