"""The compiler process: `python -m engine.grammar.compile MODEL_FOLDER`. Started, timed and ended by `engine.grammar.client`.

It answers each question, a Grammar, with a Compiled.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import xgrammar

from engine.grammar.client import Compiled
from engine.grammar.vocabulary import read_vocabulary
from engine.helper import answer_questions
from engine.ipc import die_with_parent
from engine.params import Grammar

MEMORY_BYTES = 4 << 30  # beyond it a compilation fails
NUM_THREADS = 4
PLACE_IN_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
MAX_REASON = 200  # characters: some repeat the grammar


def main() -> None:
    """Entry point."""
    die_with_parent(signal.SIGKILL)
    compiler = xgrammar.GrammarCompiler(read_vocabulary(Path(sys.argv[1])), max_threads=NUM_THREADS, cache_enabled=False)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    answer_questions(lambda question: msgspec.msgpack.encode(compiled(compiler, msgspec.msgpack.decode(question, type=Grammar))))


def compiled(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> Compiled:
    """The compiled grammar, or why it is none in words for the client."""
    kinds: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
        "json_object": lambda text: compile_schema(compiler, '{"type": "object"}'),
        "json_schema": lambda text: compile_schema(compiler, text),
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "choice": lambda text: compiler.compile_grammar(choice_grammar(msgspec.json.decode(text, type=list[str]))),
        "structural_tag": compiler.compile_structural_tag,
    }
    try:
        return Compiled(kinds[grammar.kind](grammar.text).serialize_json().encode())
    except (RuntimeError, ValueError, TypeError, MemoryError, msgspec.DecodeError) as problem:
        return Compiled(error=PLACE_IN_SOURCE.sub("", str(problem)).strip()[:MAX_REASON] or "it takes too much memory")


def compile_schema(compiler: xgrammar.GrammarCompiler, schema: str) -> xgrammar.CompiledGrammar:
    """Without white space that a model could repeat for ever."""
    return compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))


def choice_grammar(choices: list[str]) -> str:
    """One of these texts; a JSON string is one of xgrammar's EBNF, too. ValueError if there are none."""
    if not choices:
        raise ValueError("there is nothing to choose from")
    return "root ::= " + " | ".join(json.dumps(choice) for choice in choices)


if __name__ == "__main__":
    main()
