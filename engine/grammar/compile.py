"""A compiler process: `python -m engine.grammar.compile MODEL_FOLDER`. It answers each Question with a Compiled.

Each is compiled in a child that is killed when it takes too long: to start takes seconds, to fork milliseconds.
"""

import json
import multiprocessing
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
from engine.helper import answer_questions
from engine.ipc import die_with_parent
from engine.params import Grammar

FORK = multiprocessing.get_context("fork")
NICENESS = 19  # streams go first
MEMORY_BYTES = 4 << 30  # beyond it a compilation fails
NUM_THREADS = 4
PLACE_IN_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
MAX_REASON = 200  # characters: some repeat the grammar
BOUNDED = re.compile(r"(characters\w* ::= \(\()" + re.escape(r"[^\"\\\r\n]"))
PLAIN = r"[^\0-\x1f\"\\\r\n]"
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
    receiver, sender = FORK.Pipe(duplex=False)

    def run() -> None:
        die_with_parent(signal.SIGKILL)
        sender.send_bytes(msgspec.msgpack.encode(compiled(compiler, question.grammar)))

    child = FORK.Process(target=run)
    child.start()
    sender.close()
    try:
        if receiver.poll(question.seconds):
            return receiver.recv_bytes()
        problem = Compiled(error=f"it takes longer than {question.seconds:.0f} s to compile", is_late=True)
    except EOFError:
        problem = Compiled(error="it is too deep or too large to compile")
    finally:
        child.kill()
        child.join()
        receiver.close()
    return msgspec.msgpack.encode(problem)


def compiled(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> Compiled:
    kinds: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
        "json_object": lambda text: compile_schema(compiler, {"type": "object"}),
        "json_schema": lambda text: compile_schema(compiler, msgspec.json.decode(text)),
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "choice": lambda text: compiler.compile_grammar(choice_grammar(msgspec.json.decode(text, type=list[str]))),
        "structural_tag": lambda text: compiler.compile_grammar(without_controls(xgrammar.Grammar.from_structural_tag(text))),
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
