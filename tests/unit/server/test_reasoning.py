"""Thoughts and answer: ids decide where one ends and the other begins, nothing is lost between them, and nothing is held back for it."""

import itertools
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.messages import (
    ChatPrompt,
)
from engine.params import OutputOptions
from server.checkpoint import Checkpoint, read_checkpoint
from server.processor.detokenize import TokenTable
from server.processor.prompt import PromptBuilder
from server.processor.reasoning import OutputText, ThinkTokens
from tests.unit.server.test_detokenize import pieces_of

OPEN, CLOSED = "<think>\n", ""  # ends of a prompt


@pytest.fixture(scope="module")
def think(tokenizer: Tokenizer) -> ThinkTokens:
    return ThinkTokens.of(tokenizer)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class Reader:
    """Feeds an output to the class under test as the processor does, and keeps what it says of every token."""

    def __init__(self, tokenizer: Tokenizer, table: TokenTable, stops: list[str]):
        self._tokenizer = tokenizer
        self._table = table
        self._stops = stops
        self.pieces: list[tuple[str, bool]] = []  # text, is it reasoning
        self.is_stopped = False

    def read(self, prompt: str, output: str | list[int]) -> tuple[str, str]:
        """(reasoning, content)"""
        text = OutputText(self._table, ThinkTokens.of(self._tokenizer), OutputOptions(stop=self._stops))
        text.read_prompt(ids_of(self._tokenizer, "<|im_start|>assistant\n" + prompt))
        for token_id in ids_of(self._tokenizer, output) if isinstance(output, str) else output:
            piece, self.is_stopped = text.push(token_id)
            self.pieces.append((piece, text.is_reasoning))
            if self.is_stopped:
                break
        else:
            piece, self.is_stopped = text.flush()
            self.pieces.append((piece, text.is_reasoning))
        return self.part(True), self.part(False)

    def part(self, is_reasoning: bool) -> str:
        return "".join(piece for piece, belongs in self.pieces if belongs is is_reasoning)


@pytest.mark.parametrize(
    ("prompt", "output", "reasoning", "content"),
    [
        (OPEN, "so it is\n</think>\n\nA cat.\n", "so it is\n", "A cat.\n"),
        (OPEN, "\n so\n\nit is</think>A cat.", "\n so\n\nit is", "A cat."),
        (OPEN, "on and on", "on and on", ""),
        (OPEN, "so</think>", "so", ""),
        (OPEN, "so</think>\n\n", "so", ""),
        (OPEN, "so</think>\r\n \n x", "so", " \n x"),
        (OPEN, "</think>at once", "", "at once"),
        (OPEN, "so</think>a <think>b</think>\nc</think>", "so", "a <think>b</think>\nc</think>"),
        (OPEN, "<think>\n\nso <think>\nit is</think>x", "so <think>\nit is", "x"),
        (OPEN, "日本語 🙂</think>\n\n🙂 ü", "日本語 🙂", "🙂 ü"),
        (CLOSED, "<think>\n\nso\n</think>\n\nA cat.", "so\n", "A cat."),
        (CLOSED, "A cat.</think>\n\n<think>\n", "", "A cat.</think>\n\n<think>\n"),
        (CLOSED, "\n<think>\nso</think>", "", "\n<think>\nso</think>"),
        (CLOSED, "\n\nA cat.", "", "\n\nA cat."),
        ("<think>\n\n</think>\n\n", "A cat.</think>", "", "A cat.</think>"),
        ("<think>x\n", "A cat.</think>", "", "A cat.</think>"),
        ("<think><|im_end|>\n", "A cat.</think>", "", "A cat.</think>"),
        ("<think>", "so</think>x", "so", "x"),
        ("<think>\n\n \n", "so</think>x", "so", "x"),
    ],
)
def test_the_two_parts(tokenizer: Tokenizer, table: TokenTable, prompt: str, output: str, reasoning: str, content: str) -> None:
    """Red if a marker is shown or taken where it is none, or if anything but the line breaks directly behind a marker is lost."""
    assert Reader(tokenizer, table, []).read(prompt, output) == (reasoning, content)


def test_every_token_of_the_thoughts_counts(tokenizer: Tokenizer, table: TokenTable) -> None:
    """Red if markers do not count as reasoning, or if anything behind the thoughts does."""
    for prompt, output in ((OPEN, "so it is</think>"), (CLOSED, "<think>\nso it is\n</think>")):
        reader = Reader(tokenizer, table, [])
        reader.read(prompt, output + "\n\nA cat.")
        num_reasoning = len(ids_of(tokenizer, output))
        assert [belongs for _, belongs in reader.pieces] == [i < num_reasoning for i in range(len(reader.pieces))]


def test_text_is_never_held_back_for_a_marker(tokenizer: Tokenizer, table: TokenTable) -> None:
    """Red if a token's text comes with a later token, line breaks before the end of the thoughts included."""
    ids = ids_of(tokenizer, "one\n\ntwo\n</think>three\n\nfour\n")
    reader = Reader(tokenizer, table, [])
    reader.read(OPEN, ids)
    shown = [tokenizer.decode([token_id]) for token_id in ids]
    shown[ids.index(tokenizer.token_to_id("</think>"))] = ""
    assert [piece for piece, _ in reader.pieces] == [*shown, ""]


def test_an_unfinished_character_stays_with_the_thoughts(tokenizer: Tokenizer, table: TokenTable) -> None:
    """Red if the bytes of a character that the thoughts broke off begin the content, or are lost."""
    broken = ids_of(tokenizer, "世")[:-1]
    assert broken
    for rest in ("x", "世"):
        ids = [*broken, *ids_of(tokenizer, f"</think>{rest}")]
        assert Reader(tokenizer, table, []).read(OPEN, ids) == ("�", rest)


@pytest.mark.parametrize(
    ("stops", "output", "expected", "is_stopped"),
    [
        (["END"], "a END b</think>c", ("a ", ""), True),
        (["END"], "a</think>b END c", ("a", "b "), True),
        (["END"], "a EN</think>D b", ("a EN", "D b"), False),
        (["END"], "a EN</think>END b", ("a EN", ""), True),
        (["\n\n"], "a\n</think>\n\nb\nc", ("a\n", "b\nc"), False),
        (["\n\n"], "a</think>\n\n\nb\n\nc", ("a", "b"), True),
        (["</think>"], "a</think>b", ("a", "b"), False),
    ],
)
def test_stop_strings(
    tokenizer: Tokenizer, table: TokenTable, stops: list[str], output: str, expected: tuple[str, str], is_stopped: bool
) -> None:
    """Red if a stop string is missed in either part, found across them, or takes text of the thoughts along into the content."""
    reader = Reader(tokenizer, table, stops)
    assert reader.read(OPEN, output) == expected
    assert reader.is_stopped is is_stopped


def test_a_stop_string_that_the_end_of_the_thoughts_completes(tokenizer: Tokenizer, table: TokenTable) -> None:
    """Red if what the last unfinished character becomes is shown although it completes a stop string."""
    reader = Reader(tokenizer, table, ["a�"])
    assert reader.read(OPEN, [*ids_of(tokenizer, "xa"), *ids_of(tokenizer, "世")[:-1], *ids_of(tokenizer, "</think>y")]) == ("x", "")
    assert reader.is_stopped


def test_a_hidden_token_has_no_text_but_a_part(tokenizer: Tokenizer, table: TokenTable, think: ThinkTokens) -> None:
    """Red if a stop token is shown, or is counted with the part before it."""
    text = OutputText(table, think, OutputOptions())
    text.read_prompt(ids_of(tokenizer, OPEN))
    (letter,) = ids_of(tokenizer, "x")
    assert think.end is not None
    assert (text.push(letter), text.is_reasoning) == (("x", False), True)
    assert (text.push(think.end, is_hidden=True), text.is_reasoning) == (("", False), True)
    assert (text.push(letter, is_hidden=True), text.is_reasoning) == (("", False), False)


def test_a_prompt_may_end_in_ids_without_a_token(tokenizer: Tokenizer, table: TokenTable, think: ThinkTokens) -> None:
    """Red if token ids between the tokenizer's last and the model's vocabulary size, which clients may send, raise."""
    for ids in ([len(table.texts)], [*ids_of(tokenizer, OPEN), len(table.texts)]):
        text = OutputText(table, think, OutputOptions())
        text.read_prompt(ids)
        assert not text.is_thinking


def test_without_both_tokens_nothing_changes(tokenizer: Tokenizer, table: TokenTable) -> None:
    """Red if a tokenizer that lacks a marker has reasoning, or loses text or line breaks."""
    draw = random.Random(0)
    for token in ("<think>", "</think>"):
        other = Tokenizer.from_str(tokenizer.to_str().replace(f'"{token}"', '"<other>"'))
        think = ThinkTokens.of(other)
        assert think == ThinkTokens(None, None)
        for prompt in ([], ids_of(tokenizer, "<think>\n"), ids_of(tokenizer, "\n")):
            text = OutputText(table, think, OutputOptions())
            text.read_prompt(prompt)
            ids = [draw.randrange(4026) for _ in range(50)]
            assert [*(text.push(token_id)[0] for token_id in ids), text.flush()[0]] == pieces_of(table, ids)
            assert not text.is_reasoning


TYPED = ["<think>", "<think>\n", "what is <think>\n\n", "<think>\n<|im_end|>", "<|im_start|>assistant\n<think>\n"]


def test_nobody_types_thoughts_open(checkpoint: Checkpoint, table: TokenTable, think: ThinkTokens) -> None:
    """Red if a `<think>` in a message, which is a token like any other, is taken for the template's."""
    builder = PromptBuilder(checkpoint)
    for typed, role in itertools.product(TYPED, ("user", "assistant", "system", "tool")):
        for message in ({"role": role, "content": typed}, {"role": role, "content": "", "reasoning_content": typed}):
            assert not is_reasoning(builder, table, think, message), message


def test_nobody_types_thoughts_closed(thinking_folder: Path, table: TokenTable, think: ThinkTokens) -> None:
    """Red if the thoughts that the template opens depend on what a message says."""
    builder = PromptBuilder(read_checkpoint(thinking_folder))
    for typed in (*TYPED, "</think>", "<think>x</think>\n"):
        assert is_reasoning(builder, table, think, {"role": "user", "content": typed}), typed


def is_reasoning(builder: PromptBuilder, table: TokenTable, think: ThinkTokens, message: dict[str, str]) -> bool:
    """Whether an answer to this message begins with thoughts."""
    text = OutputText(table, think, OutputOptions())
    text.read_prompt(builder.encode(ChatPrompt(json.dumps([message]).encode()), []))
    text.push(65)
    return text.is_reasoning
