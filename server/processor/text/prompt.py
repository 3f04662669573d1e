"""Messages to token ids: chat template, special tokens, placeholders.

A rendered text is cut at its special tokens, which are the template's own; then the markers in the pieces become text again.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from engine.wire.params import MAX_BAD_WORD_TOKENS, ChatPrompt, Prompt
from models.config.types import MediaKind
from server.checkpoint import Checkpoint
from server.errors import PROMPT, RequestError
from server.processor.text.template import ChatTemplate, Rendered

MAX_TOKENS = 1 << 20  # limit of a prompt that is only counted
USUAL_CHARACTERS = 6  # per token; usual texts have fewer
PIECE_CHARACTERS = 1 << 14
MARGIN = 0.1


def too_long(limit: int, num_tokens: str) -> RequestError:
    maximum = f"This model's maximum context length is {limit} tokens, answer included."  # client libraries match this text
    words = f"{maximum} However, your prompt is too long: it has {num_tokens} tokens. Please reduce its length."
    return RequestError(400, words, PROMPT, "context_length_exceeded")


class Visual(NamedTuple):
    """Numbers of placeholders of a medium's items. An item with a caption follows it, between a start and an end token."""

    kind: MediaKind
    lengths: list[int]
    captions: list[str] | None = None


class ExpandedPrompt(NamedTuple):
    """int32 ids with placeholders of all items of media. Item k of medium i begins at `starts[i][k]`."""

    ids: "array[int]"
    starts: list[list[int]]


class PromptBuilder:
    """The checkpoint's tokenizer and chat template. Immutable; may be used from several threads."""

    def __init__(self, checkpoint: Checkpoint):
        self.tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_file))
        self._literal = Tokenizer.from_file(str(checkpoint.tokenizer_file))
        self._literal.encode_special_tokens = True  # special tokens in its input are text
        model = checkpoint.model
        self._placeholders, self._ends = model.placeholder_ids, (model.vision_start_token_id, model.vision_end_token_id)
        self._kinds = {placeholder: kind for kind, placeholder in self._placeholders.items()}
        self._frame = _frame_of(self.tokenizer)
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        variables, is_plain = checkpoint.special_tokens | checkpoint.template_kwargs, not self._placeholders
        self.template = ChatTemplate(checkpoint.chat_template, list(self._special_ids), variables, joins_parts=is_plain)

    def size(self, prompt: Prompt) -> int:
        """Return the bytes of JSON or text, or the number of ids, to which the time of `encode` is proportional."""
        return len(prompt.messages) + len(prompt.tools or b"") if isinstance(prompt, ChatPrompt) else len(prompt)

    def encode(self, prompt: Prompt, kinds: Sequence[MediaKind], limit: int = MAX_TOKENS, is_framed: bool = False) -> list[int]:
        """Return token ids with one placeholder per medium. `is_framed`: a chat gets the tokens that the tokenizer puts around a text.
        RequestError 400 if the template does not show every medium, or, early, for far more tokens than `limit`."""
        if kinds and not self._placeholders:
            raise RequestError(400, "this model does not support images", PROMPT, "invalid_value")
        is_chat = isinstance(prompt, ChatPrompt)
        if isinstance(prompt, ChatPrompt):
            ids = self._encode_rendered(self.template.render(prompt), limit)
            if not ids:
                raise RequestError(400, "The chat template renders these messages to an empty prompt.", PROMPT)
        elif isinstance(prompt, list):
            if len(prompt) > limit and not kinds:
                raise too_long(limit, str(len(prompt)))
            ids = self._shortened(prompt) if kinds else prompt
        else:
            self._check_size(prompt, limit)
            ids = [*self._frame[0], *self._encode_piece(prompt)]
        shown = [self._kinds[token_id] for token_id in ids if token_id in self._kinds]
        if shown != list(kinds):
            words = f"The prompt shows {len(shown)} images and videos, the request has {len(kinds)}: see its chat template."
            raise RequestError(400, words, PROMPT, "invalid_value")
        return [*self._frame[0], *ids, *self._frame[1]] if is_framed and is_chat else ids

    def _shortened(self, ids: list[int]) -> list[int]:
        """Replace a run of placeholders, one for each of an image's tokens, by a single one: images are never adjacent."""
        pairs, image = zip(ids, [None, *ids], strict=False), self._placeholders["image"]
        return [token_id for token_id, before in pairs if not (token_id == before == image)]

    def first_tokens(self, words: list[str]) -> tuple[int, ...]:
        return tuple(self._ids_of(word)[0] for word in words)

    def _ids_of(self, word: str) -> tuple[int, ...]:
        return tuple(self._literal.encode(word, add_special_tokens=False).ids)

    def bad_words(self, texts: list[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word, also after a space. RequestError 400 for one that is too long."""
        found: dict[tuple[int, ...], None] = {}
        for bad in texts:
            for text in (bad, " " + bad.lstrip()):
                ids = self._ids_of(text)
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    words = f"bad_words: a word may have {MAX_BAD_WORD_TOKENS} tokens at most."
                    raise RequestError(400, words, "bad_words", "invalid_value")
                found[ids] = None
        return tuple(found)

    def _check_size(self, text: str, limit: int) -> None:
        """Raise RequestError 400 as soon as the first pieces of an unusually long text have too many tokens."""
        if len(text) <= limit * USUAL_CHARACTERS:
            return
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            num_tokens += len(self._encode_piece(text[start : start + PIECE_CHARACTERS]))
            if num_tokens > limit * (1 + MARGIN):
                raise too_long(limit, f"more than {limit}")

    def _encode_rendered(self, rendered: Rendered, limit: int) -> list[int]:
        self._check_size(rendered.text, limit)
        if not rendered.originals:
            return self._encode_piece(rendered.text)
        pieces = self.template.special.split(rendered.text)
        tokens = self.template.special.findall(rendered.text)
        encodings = self._literal.encode_batch_fast([rendered.reveal(piece) for piece in pieces], add_special_tokens=False)
        ids: list[int] = list(encodings[0].ids)
        for token, encoding in zip(tokens, encodings[1:], strict=True):
            ids.append(self._special_ids[token])
            ids.extend(encoding.ids)
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def expand(self, ids: Sequence[int], visuals: Sequence[Visual]) -> ExpandedPrompt:
        """Expand placeholders. Items' start and end tokens are inside those of the template, as in transformers 5.10 and later."""
        prompt, position = ExpandedPrompt(array("i"), []), 0
        for visual in visuals:
            placeholder = self._placeholders[visual.kind]
            slot = ids.index(placeholder, position)
            prompt.ids.extend(ids[position:slot])
            starts = []
            for k, length in enumerate(visual.lengths):
                if visual.captions is not None:
                    prompt.ids.extend([*self._encode_piece(visual.captions[k]), self._ends[0]])
                starts.append(len(prompt.ids))
                prompt.ids.extend(array("i", [placeholder]) * length)
                if visual.captions is not None:
                    prompt.ids.append(self._ends[1])
            prompt.starts.append(starts)
            position = slot + 1
        prompt.ids.extend(ids[position:])
        return prompt


def _frame_of(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer adds before and after a text."""
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    framed: list[int] = tokenizer.encode("a").ids
    start = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
    return framed[:start], framed[start + len(bare) :]
