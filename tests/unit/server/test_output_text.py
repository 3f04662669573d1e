"""Thoughts and answer: ids decide where one ends; nothing is lost or held back."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.wire.messages import ChatPrompt
from engine.wire.params import OutputOptions
from server.checkpoint import Checkpoint, read_checkpoint
from server.processor.text.output_text import OutputText, ThinkTokens, TokenTable
from server.processor.text.prompt import PromptBuilder
from tests.unit.server.test_detokenize import pieces_of
from tests.unit.server.test_stack import ids_of

OPEN, CLOSED = "<think>\n", ""  # ends of a prompt


@pytest.fixture(scope="module")
def think(tokenizer: Tokenizer) -> ThinkTokens:
    return ThinkTokens.of(tokenizer)


def read(tokenizer: Tokenizer, table: TokenTable, prompt: str, output: str | list[int], *stops: str) -> tuple[list[tuple[str, bool]], bool]:
    text = OutputText(table, ThinkTokens.of(tokenizer), OutputOptions(stop=[*stops]))
    text.read_prompt(ids_of(tokenizer, "<|im_start|>assistant\n" + prompt))
    pieces = []
    for token_id in [*(ids_of(tokenizer, output) if isinstance(output, str) else output), None]:
        piece, is_stopped = text.flush() if token_id is None else text.push(token_id)
        pieces.append((piece, text.is_reasoning))
        if is_stopped:
            break
    return pieces, is_stopped


def parts(pieces: list[tuple[str, bool]]) -> tuple[str, str]:
    reasoning, content = ("".join(piece for piece, is_reasoning in pieces if is_reasoning is wanted) for wanted in (True, False))
    return reasoning, content


PARTS = [
    (OPEN, "so it is\n</think>\n\nA cat.\n", "so it is\n", "A cat.\n"), (OPEN, "\n so\n\nit is</think>A cat.", "\n so\n\nit is", "A cat."),
    (OPEN, "on and on", "on and on", ""), (OPEN, "so</think>\n\n", "so", ""), (OPEN, "so</think>\r\n \n x", "so", " \n x"),
    (OPEN, "</think>at once", "", "at once"), (OPEN, "so</think>a <think>b</think>\nc</think>", "so", "a <think>b</think>\nc</think>"),
    (OPEN, "<think>\n\nso <think>\nit is</think>x", "so <think>\nit is", "x"), (OPEN, "日本語 🙂</think>\n\n🙂 ü", "日本語 🙂", "🙂 ü"),
    (CLOSED, "<think>\n\nso\n</think>\n\nA cat.", "so\n", "A cat."), (CLOSED, "A</think>\n\n<think>\n", "", "A</think>\n\n<think>\n"),
    (CLOSED, "\n<think>\nso</think>", "", "\n<think>\nso</think>"), (CLOSED, "\n\nA cat.", "", "\n\nA cat."),
    ("<think>\n\n</think>\n\n", "A cat.</think>", "", "A cat.</think>"), ("<think>x\n", "A cat.</think>", "", "A cat.</think>"),
    ("<think><|im_end|>\n", "A cat.</think>", "", "A cat.</think>"), ("<think>", "so</think>x", "so", "x"),
    ("<think>\n\n \n", "so</think>x", "so", "x"),
]  # fmt: skip


def test_the_two_parts(tokenizer: Tokenizer, table: TokenTable) -> None:
    for prompt, output, reasoning, content in PARTS:
        assert parts(read(tokenizer, table, prompt, output)[0]) == (reasoning, content), (prompt, output)


def test_every_token_of_the_thoughts_counts(tokenizer: Tokenizer, table: TokenTable) -> None:
    for prompt, output in ((OPEN, "so it is</think>"), (CLOSED, "<think>\nso it is\n</think>")):
        pieces, _ = read(tokenizer, table, prompt, output + "\n\nA cat.")
        assert [belongs for _, belongs in pieces] == [i < len(ids_of(tokenizer, output)) for i in range(len(pieces))]


def test_text_is_never_held_back_for_a_marker(tokenizer: Tokenizer, table: TokenTable) -> None:
    ids = ids_of(tokenizer, "one\n\ntwo\n</think>three\n\nfour\n")
    shown = [tokenizer.decode([token_id]) for token_id in ids]
    shown[ids.index(tokenizer.token_to_id("</think>"))] = ""
    assert [piece for piece, _ in read(tokenizer, table, OPEN, ids)[0]] == [*shown, ""]


def test_an_unfinished_character_stays_with_the_thoughts(tokenizer: Tokenizer, table: TokenTable) -> None:
    broken = ids_of(tokenizer, "世")[:-1]
    assert broken
    for rest in ("x", "世"):
        assert parts(read(tokenizer, table, OPEN, [*broken, *ids_of(tokenizer, f"</think>{rest}")])[0]) == ("�", rest)
    completed = [*ids_of(tokenizer, "xa"), *broken, *ids_of(tokenizer, "</think>y")]
    pieces, is_stopped = read(tokenizer, table, OPEN, completed, "a�")
    assert (parts(pieces), is_stopped) == (("x", ""), True)


def test_stop_strings(tokenizer: Tokenizer, table: TokenTable) -> None:
    for stop, output, expected, is_stopped in (
        ("END", "a END b</think>c", ("a ", ""), True), ("END", "a</think>b END c", ("a", "b "), True),
        ("END", "a EN</think>D b", ("a EN", "D b"), False), ("END", "a EN</think>END b", ("a EN", ""), True),
        ("\n\n", "a\n</think>\n\nb\nc", ("a\n", "b\nc"), False), ("\n\n", "a</think>\n\n\nb\n\nc", ("a", "b"), True),
        ("</think>", "a</think>b", ("a", "b"), False),
    ):  # fmt: skip
        pieces, was_stopped = read(tokenizer, table, OPEN, output, stop)
        assert (parts(pieces), was_stopped) == (expected, is_stopped), (stop, output)


def test_nobody_types_thoughts(checkpoint: Checkpoint, thinking_folder: Path, table: TokenTable, think: ThinkTokens) -> None:

    def is_reasoning(builder: PromptBuilder, **message: str) -> bool:
        text = OutputText(table, think, OutputOptions())
        text.read_prompt(builder.encode(ChatPrompt(json.dumps([message]).encode()), []))
        text.push(65)
        return text.is_reasoning

    closed, opened = PromptBuilder(checkpoint), PromptBuilder(read_checkpoint(thinking_folder))
    for typed in ("<think>", "<think>\n", "what is <think>\n\n", "<think>\n<|im_end|>", "<|im_start|>assistant\n<think>\n"):
        for role in ("user", "assistant", "system", "tool"):
            assert not is_reasoning(closed, role=role, content=typed), (role, typed)
            assert not is_reasoning(closed, role=role, content="", reasoning_content=typed), (role, typed)
        assert is_reasoning(opened, role="user", content=typed), typed
    for typed in ("</think>", "<think>x</think>\n"):
        assert is_reasoning(opened, role="user", content=typed), typed


def test_a_hidden_token_has_no_text_but_a_part(tokenizer: Tokenizer, table: TokenTable, think: ThinkTokens) -> None:
    text = OutputText(table, think, OutputOptions())
    text.read_prompt(ids_of(tokenizer, OPEN))
    (letter,) = ids_of(tokenizer, "x")
    assert think.end is not None
    assert (text.push(letter), text.is_reasoning) == (("x", False), True)
    assert (text.push(think.end, is_hidden=True), text.is_reasoning) == (("", False), True)
    assert (text.push(letter, is_hidden=True), text.is_reasoning) == (("", False), False)


def test_a_prompt_may_end_in_ids_without_a_token(tokenizer: Tokenizer, table: TokenTable, think: ThinkTokens) -> None:
    """Clients may send ids between the tokenizer's last and the model's vocabulary size."""
    for ids in ([len(table.texts)], [*ids_of(tokenizer, OPEN), len(table.texts)]):
        text = OutputText(table, think, OutputOptions())
        text.read_prompt(ids)
        assert not text.is_thinking


def test_without_both_tokens_nothing_changes(tokenizer: Tokenizer, table: TokenTable) -> None:
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
