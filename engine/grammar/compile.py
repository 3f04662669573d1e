"""Guest that compiles grammars: it answers a Grammar with a Compiled. Importing xgrammar takes seconds and imports torch."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xgrammar
from tokenizers import Tokenizer

from engine.grammar.client import Compiled
from engine.wire.grammar import Grammar
from models.config.huggingface import read_config

NUM_THREADS = 4
PLACE_IN_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
MAX_REASON = 200  # characters of an error, which may contain the grammar
BOUNDED = re.compile(r"(characters\w* ::= \(\(\[\^)")  # of strings with a length limit, in which xgrammar accepts control characters
CONTROL = r"\0-\x1f"
LARK_SCHEMA = re.compile(r"%json\s*(?=\{)")
LLGUIDANCE = re.compile(r"^\s*%llguidance\s*\{[^\n]*\}\s*$", re.MULTILINE)


def prepare(model_folder: str) -> Callable[[bytes], bytes]:
    compiler = xgrammar.GrammarCompiler(read_vocabulary(Path(model_folder)), max_threads=NUM_THREADS, cache_enabled=False)
    return lambda job: msgspec.msgpack.encode(compiled(compiler, msgspec.msgpack.decode(job, type=Grammar)))


def read_vocabulary(folder: Path) -> xgrammar.TokenizerInfo:
    """Read a byte-level tokenizer. Grammars allow no special token except the end."""
    tokenizer, config = Tokenizer.from_file(str(folder / "tokenizer.json")), read_config(folder)
    tokens = [""] * config.text.vocab_size
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id not in special:
            tokens[token_id] = text
    ends = list(config.eos_token_ids)
    return xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.BYTE_LEVEL, vocab_size=len(tokens), stop_token_ids=ends)


def compiled(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> Compiled:
    kinds: dict[str, Callable[[str], str | xgrammar.Grammar]] = {
        "json_schema": schema_grammar,
        "regex": xgrammar.Grammar.from_regex,
        "ebnf": ebnf_of,
        "structural_tag": lambda text: json_ebnf(xgrammar.Grammar.from_structural_tag(json.dumps(without_lark(json.loads(text))))),
    }
    try:
        done = compiler.compile_grammar(kinds[grammar.kind](grammar.text))
        return Compiled(done.serialize_json().encode())
    except (RuntimeError, ValueError, TypeError, AttributeError, MemoryError) as problem:
        return Compiled(error=PLACE_IN_SOURCE.sub("", str(problem)).strip()[:MAX_REASON] or "the grammar takes too much memory to compile")


def schema_grammar(schema: str, separators: tuple[str, str] = (",", ":")) -> str:
    """Return the EBNF of a schema without other white space, which a model could repeat forever. Raises ValueError or RuntimeError."""
    return json_ebnf(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False, separators=separators))


def json_ebnf(grammar: xgrammar.Grammar) -> str:
    """Return the EBNF of a grammar whose strings are valid JSON."""
    return BOUNDED.sub(lambda match: match[1] + CONTROL, str(grammar))


def ebnf_of(grammar: str) -> str:
    """Return EBNF from EBNF or Lark, also in guidance's form. Raises ValueError or RuntimeError."""
    if "::=" in grammar:
        return grammar
    bare = LLGUIDANCE.sub("", grammar).replace("(?s:.*)", r"(.|\n)*")
    schemas: dict[str, xgrammar.Grammar | str] = {}
    while found := LARK_SCHEMA.search(bare):
        schema, end = json.JSONDecoder().raw_decode(bare, found.end())
        options = schema.pop("x-guidance", {})
        separators = options.get("item_separator", ","), options.get("key_separator", ":")
        name = f"schema_{len(schemas)}"
        schemas[name] = xgrammar.Grammar.from_ebnf(schema_grammar(json.dumps(schema), separators))
        bare = f"{bare[: found.start()]}@{name}{bare[end:]}"
    return str(xgrammar.Grammar.from_lark(bare, named_grammars=schemas))


def without_lark(tag: Any) -> Any:
    """Return a part of a structural tag whose grammars are EBNF."""
    if isinstance(tag, list):
        return [without_lark(one) for one in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "grammar" and isinstance(tag.get("grammar"), str):
        return tag | {"grammar": ebnf_of(tag["grammar"])}
    return {name: one if name == "json_schema" else without_lark(one) for name, one in tag.items()}
