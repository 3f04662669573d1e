"""Guest that compiles a Grammar to a Compiled, which rank 0 reads. Importing xgrammar takes seconds and imports torch."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import xgrammar
from tokenizers import Tokenizer

from engine.wire.grammar import Compiled, Grammar
from models.config.huggingface import read_config

NUM_THREADS = 4
PLACE_IN_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
MAX_REASON = 200  # characters of an error, which may contain the grammar
BOUNDED = re.compile(r"(characters\w* ::= \(\(\[\^)")  # of strings with a length limit, in which xgrammar accepts control characters
CONTROL = r"\0-\x1f"
LARK_SCHEMA = re.compile(r"%json\s*(?=\{)")
WITH_TEMPERATURE = re.compile(r"^\w+\[[^\]\n]*\btemperature=", re.MULTILINE)  # of a rule; xgrammar accepts and ignores it
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
    try:
        return Compiled(compiler.compile_grammar(rules_of(grammar)).serialize_json().encode())
    except (RuntimeError, ValueError, TypeError, AttributeError, MemoryError) as problem:
        return Compiled(error=PLACE_IN_SOURCE.sub("", str(problem)).strip()[:MAX_REASON] or "the grammar takes too much memory to compile")


def rules_of(grammar: Grammar) -> xgrammar.Grammar:
    """Raises ValueError or RuntimeError for a grammar that is not valid."""
    match grammar.kind:
        case "json_schema":
            rules = schema_rules(grammar.text)
        case "regex":
            rules = xgrammar.Grammar.from_regex(grammar.text)
        case "structural_tag":
            rules = json_rules(xgrammar.Grammar.from_structural_tag(grammar.text))
        case "ebnf":
            rules = xgrammar.Grammar.from_ebnf(grammar.text) if "::=" in grammar.text else lark_rules(grammar.text)
    return rules if grammar.otherwise is None else xgrammar.Grammar.union(rules, rules_of(grammar.otherwise))


def schema_rules(schema: str, separators: tuple[str, str] = (",", ":")) -> xgrammar.Grammar:
    """Convert a schema without other white space, which a model could repeat forever."""
    return json_rules(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False, separators=separators))


def json_rules(grammar: xgrammar.Grammar) -> xgrammar.Grammar:
    """Return a grammar whose strings are valid JSON."""
    return xgrammar.Grammar.from_ebnf(BOUNDED.sub(lambda match: match[1] + CONTROL, str(grammar)))


def lark_rules(grammar: str) -> xgrammar.Grammar:
    """Convert Lark, also in guidance's form."""
    bare = LLGUIDANCE.sub("", grammar).replace("(?s:.*)", r"(.|\n)*")
    schemas: dict[str, xgrammar.Grammar | str] = {}
    while found := LARK_SCHEMA.search(bare):
        schema, end = json.JSONDecoder().raw_decode(bare, found.end())
        options = schema.pop("x-guidance", {})
        separators = options.get("item_separator", ","), options.get("key_separator", ":")
        name = f"schema_{len(schemas)}"
        schemas[name] = schema_rules(json.dumps(schema), separators)
        bare = f"{bare[: found.start()]}@{name}{bare[end:]}"
    rules = xgrammar.Grammar.from_lark(bare, named_grammars=schemas)
    if WITH_TEMPERATURE.search(str(rules)):
        raise ValueError("the attribute 'temperature' of a rule is not supported")
    return rules
