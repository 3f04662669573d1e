"""A compiler process: `python -m engine.grammar.compile MODEL_FOLDER`. It answers each Question with a Compiled.

Each is compiled in a child that is killed when it takes too long.
"""

import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import xgrammar

from engine.grammar.client import Compiled, Question
from engine.grammar.schema import check
from engine.grammar.vocabulary import read_vocabulary
from engine.helper import answer_in_child, answer_questions
from engine.ipc import die_with_parent
from engine.params import Grammar

NICENESS = 19  # streams go first
MEMORY_BYTES = 4 << 30  # beyond it a compilation fails
NUM_THREADS = 4
PLACE_IN_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
MAX_REASON = 200  # characters: some repeat the grammar
BOUNDED = re.compile(r"(characters\w* ::= \(\()" + re.escape(r"[^\"\\\r\n]"))
PLAIN = r"[^\0-\x1f\"\\\r\n]"
EBNF_RULE = re.compile(r"^\s*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)
LARK_RULE = re.compile(r"^\s*[?!]?[A-Za-z_]\w*(\[[^\]\n]*\])?(\.-?\d+)?\s*:", re.MULTILINE)
LARK_ATTRIBUTES = re.compile(r"^(\s*[?!]?[A-Za-z_]\w*)\[([^\]\n]*)\](?=\s*:)", re.MULTILINE)
LARK_SCHEMA = re.compile(r"%json\s*(?=\{)")
ATTRIBUTE = re.compile(r"(\w+)(?:\s*=\s*(?:\"(?:[^\"\\]|\\.)*\"|[^,]*))?\s*(?:,|$)")
LLGUIDANCE = re.compile(r"^\s*%llguidance\s*\{[^\n]*\}\s*$", re.MULTILINE)
NUM_FOLLOWED = 64
MAX_TOKEN_S = 0.05  # for one token; usual ones take a hundredth


def main() -> None:
    """Entry point."""
    die_with_parent(signal.SIGKILL)
    os.nice(NICENESS)
    compiler = xgrammar.GrammarCompiler(read_vocabulary(Path(sys.argv[1])), max_threads=NUM_THREADS, cache_enabled=False)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    answer_questions(lambda question: answer(compiler, msgspec.msgpack.decode(question, type=Question)))


def answer(compiler: xgrammar.GrammarCompiler, question: Question) -> bytes:
    """A Compiled. No threads run here: it may fork."""
    try:
        return answer_in_child(lambda: msgspec.msgpack.encode(compiled(compiler, question.grammar)), question.seconds)
    except TimeoutError:
        problem = Compiled(error=f"it takes longer than {question.seconds:.0f} s to compile", is_late=True)
    except EOFError:
        problem = Compiled(error="it is too deep or too large to compile")
    return msgspec.msgpack.encode(problem)


def compiled(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> Compiled:
    kinds: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
        "json_object": lambda text: compile_schema(compiler, {"type": "object"}),
        "json_schema": lambda text: compile_schema(compiler, msgspec.json.decode(text)),
        "regex": compiler.compile_regex,
        "ebnf": lambda text: compiler.compile_grammar(ebnf_of(text)),
        "choice": lambda text: compiler.compile_grammar(choice_grammar(msgspec.json.decode(text, type=list[str]))),
        "structural_tag": lambda text: compiler.compile_grammar(without_controls(xgrammar.Grammar.from_structural_tag(with_ebnf(text)))),
    }
    try:
        done = kinds[grammar.kind](grammar.text)
        follow(done)
        return Compiled(done.serialize_json().encode())
    except (RuntimeError, ValueError, TypeError, MemoryError, msgspec.DecodeError) as problem:
        return Compiled(error=PLACE_IN_SOURCE.sub("", str(problem)).strip()[:MAX_REASON] or "it takes too much memory")


def compile_schema(compiler: xgrammar.GrammarCompiler, schema: object) -> xgrammar.CompiledGrammar:
    """Without white space, which a model could repeat for ever. Raises ValueError."""
    check(schema)
    return compiler.compile_grammar(
        without_controls(xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, separators=(",", ":")))
    )


def without_controls(grammar: xgrammar.Grammar) -> xgrammar.Grammar:
    """xgrammar's rule for a string of a bounded length lets control characters in, which JSON does not."""
    text, num_changed = BOUNDED.subn(lambda match: match[1] + PLAIN, str(grammar))
    return xgrammar.Grammar.from_ebnf(text) if num_changed else grammar


def ebnf_of(grammar: str) -> str:
    """EBNF as it is; Lark, also as guidance writes it, as EBNF. ValueError for what a rule says beside its text."""
    if EBNF_RULE.search(grammar) or not LARK_RULE.search(grammar):
        return grammar

    def without_attributes(rule: re.Match[str]) -> str:
        if unknown := [name for name in ATTRIBUTE.findall(rule[2]) if name != "capture"]:
            raise ValueError(f"the attribute '{unknown[0]}' of the Lark rule '{rule[1]}' is not supported")
        return rule[1]

    bare = LARK_ATTRIBUTES.sub(without_attributes, LLGUIDANCE.sub("", grammar)).replace("(?s:.*)", r"(.|\n)*")
    schemas: dict[str, xgrammar.Grammar | str] = {}
    while found := LARK_SCHEMA.search(bare):
        schema, end = json.JSONDecoder().raw_decode(bare, found.end())
        name = f"schema_{len(schemas)}"
        schemas[name] = lark_schema(schema)
        bare = f"{bare[: found.start()]}@{name}{bare[end:]}"
    return str(xgrammar.Grammar.from_lark(bare, named_grammars=schemas))


def lark_schema(schema: dict[str, object]) -> xgrammar.Grammar:
    """With the white space that guidance asks for, else with none."""
    spaces = schema.pop("x-guidance", {})
    check(schema)
    told = spaces if isinstance(spaces, dict) else {}
    separators = str(told.get("item_separator", ",")), str(told.get("key_separator", ":"))
    return without_controls(xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, separators=separators))


def with_ebnf(tag: str) -> str:
    """A structural tag whose grammars are EBNF."""

    def walked(value: object) -> object:
        if isinstance(value, list):
            return [walked(one) for one in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == "grammar" and isinstance(value.get("grammar"), str):
            return value | {"grammar": ebnf_of(value["grammar"])}
        return {name: one if name == "json_schema" else walked(one) for name, one in value.items()}

    return json.dumps(walked(json.loads(tag)))


def choice_grammar(choices: list[str]) -> str:
    """A JSON string is one of xgrammar's EBNF, too. ValueError if there are none."""
    if not choices:
        raise ValueError("there is nothing to choose from")
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def follow(grammar: xgrammar.CompiledGrammar) -> None:
    """Draws some tokens at random as a worker would. ValueError if that is too slow."""
    matcher, rng = xgrammar.GrammarMatcher(grammar), random.Random(0)
    vocab_size = grammar.tokenizer_info.vocab_size
    words = xgrammar.allocate_token_bitmask(1, vocab_size)
    for _ in range(NUM_FOLLOWED):
        started = time.process_time()
        matcher.fill_next_token_bitmask(words)
        allowed = np.flatnonzero(np.unpackbits(words.numpy().view(np.uint8), bitorder="little")[:vocab_size])
        if not len(allowed):
            return
        matcher.accept_token(int(rng.choice(allowed)))
        if time.process_time() - started > MAX_TOKEN_S:
            raise ValueError("it takes too long to follow")
        if matcher.is_terminated():
            return


if __name__ == "__main__":
    main()
