"""Guest that compiles grammars: it answers a Grammar with a Compiled. Importing xgrammar takes seconds and imports torch."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xgrammar
from tokenizers import Tokenizer

from engine.grammar.client import Compiled
from engine.wire.grammar import OWNER, Grammar
from models.config.huggingface import read_config

NUM_THREADS = 4
PLACE_IN_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
MAX_REASON = 200  # characters of an error, which may contain the grammar
BOUNDED = re.compile(r"(characters\w* ::= \(\()" + re.escape(r"[^\"\\\r\n]"))
PLAIN = r"[^\0-\x1f\"\\\r\n]"
MAX_DIGITS = 19  # after the first
DIGIT_RULE = re.compile(r"^(\w+) ::= \(\(\[0-9\]\)\)$", re.MULTILINE)
UNBOUNDED = re.compile(  # an unbounded repetition outside of literals and character classes
    r'"(?:[^"\\]|\\.)*"|(?P<rule>\w+|\[0-9\])(?:\*|\{(?P<least>\d+), -1\})|\[(?:[^\]\\]|\\.)*\]'
)
EBNF_RULE = re.compile(r"^\s*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)
LARK_RULE = re.compile(r"^\s*[?!]?[A-Za-z_]\w*(\[[^\]\n]*\])?(\.-?\d+)?\s*:", re.MULTILINE)
LARK_SCHEMA = re.compile(r"%json\s*(?=\{)")
TEMPERATURE = re.compile(r"^\w+\[[^\]\n]*\btemperature=", re.MULTILINE)  # in a rule of xgrammar's EBNF
LLGUIDANCE = re.compile(r"^\s*%llguidance\s*\{[^\n]*\}\s*$", re.MULTILINE)
# Keywords of JSON schemas. The compiler would silently ignore those of REFUSED.
REFUSED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef",
})  # fmt: skip
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$defs", "definitions",
    "$schema", "$id",
})  # fmt: skip
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
MAPS = ("properties", "patternProperties", "$defs", "definitions")
SINGLE = ("items", "additionalProperties", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "propertyNames")


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
        "json_schema": lambda text: schema_grammar(msgspec.json.decode(text)),
        "regex": xgrammar.Grammar.from_regex,
        "ebnf": ebnf_of,
        # JSON strings are valid EBNF
        "choice": lambda text: "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices_of(text)),
        "structural_tag": lambda text: xgrammar.Grammar.from_structural_tag(json.dumps(with_ebnf(json.loads(text)))),
    }
    try:
        done = compiler.compile_grammar(kinds[grammar.kind](grammar.text))
        return Compiled(done.serialize_json().encode())
    except (RuntimeError, ValueError, TypeError, MemoryError, msgspec.DecodeError) as problem:
        return Compiled(error=PLACE_IN_SOURCE.sub("", str(problem)).strip()[:MAX_REASON] or "the grammar takes too much memory to compile")


def choices_of(text: str) -> list[str]:
    return msgspec.json.decode(text, type=list[str])


def schema_grammar(schema: object, separators: tuple[str, str] = (",", ":")) -> xgrammar.Grammar:
    """Return the grammar of a schema without other white space, which a model could repeat forever. Raises ValueError."""
    check(schema)
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, separators=separators)
    return xgrammar.Grammar.from_ebnf(bounded(grammar))


def bounded(grammar: xgrammar.Grammar) -> str:
    """Return EBNF with two corrections: numbers have at most 20 digits, and strings of bounded length no control characters."""
    text = BOUNDED.sub(lambda match: match[1] + PLAIN, str(grammar))
    digits = {"[0-9]", *DIGIT_RULE.findall(text)}

    def limit(match: re.Match[str]) -> str:
        least = int(match["least"] or 0)
        return f"{match['rule']}{{{least}, {max(least, MAX_DIGITS)}}}" if match["rule"] in digits else match[0]

    return UNBOUNDED.sub(limit, text)


def ebnf_of(grammar: str) -> str:
    """Return EBNF from EBNF or Lark, also in guidance's form. Raises ValueError."""
    if EBNF_RULE.search(grammar) or not LARK_RULE.search(grammar):
        return grammar
    bare = LLGUIDANCE.sub("", grammar).replace("(?s:.*)", r"(.|\n)*")
    schemas: dict[str, xgrammar.Grammar | str] = {}
    while found := LARK_SCHEMA.search(bare):
        schema, end = json.JSONDecoder().raw_decode(bare, found.end())
        name = f"schema_{len(schemas)}"
        options = schema.pop("x-guidance", None)
        options = options if isinstance(options, dict) else {}
        separators = str(options.get("item_separator", ",")), str(options.get("key_separator", ":"))
        schemas[name] = schema_grammar(schema, separators)
        bare = f"{bare[: found.start()]}@{name}{bare[end:]}"
    ebnf = str(xgrammar.Grammar.from_lark(bare, named_grammars=schemas))
    if TEMPERATURE.search(ebnf):
        raise ValueError("the attribute 'temperature' of a Lark rule is not supported")
    return ebnf


def with_ebnf(value: Any) -> Any:
    """Return a part of a structural tag whose grammars and schemas are EBNF. Schemas are checked unless their OWNER is None."""
    if isinstance(value, list):
        return [with_ebnf(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "grammar" and isinstance(value.get("grammar"), str):
        return value | {"grammar": ebnf_of(value["grammar"])}
    if "json_schema" in value:
        if (owner := value.pop(OWNER, "")) is not None:
            check(value["json_schema"], owner)
        alone = {"type": "structural_tag", "format": value}
        return {"type": "grammar", "grammar": bounded(xgrammar.Grammar.from_structural_tag(json.dumps(alone)))}
    return {name: with_ebnf(one) for name, one in value.items()}


def check(schema: object, owner: str = "") -> None:
    """Raise ValueError for a part of a schema that the grammar would not enforce."""
    for problem in problems_of(schema):
        raise ValueError(f"{owner}{problem}")


def problems_of(schema: object) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    for keyword in REFUSED & schema.keys():
        yield f"the keyword {keyword} is not supported"
    if schema.get("uniqueItems") is True:
        yield "the keyword uniqueItems is not supported"
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        yield "a $ref must lead to a part of the same schema"
    for keyword in ("$ref", "allOf"):
        others = schema.keys() - ANNOTATIONS - {keyword}
        if keyword in schema and others:
            yield f"{keyword} with {min(others)} is not supported"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield "allOf of several schemas is not supported"
    if "pattern" in schema and (others := {"minLength", "maxLength", "format"} & schema.keys()):
        yield f"pattern with {min(others)} is not supported"
    if "multipleOf" in schema and schema.get("type") != "integer":
        yield "multipleOf is only supported for type integer"
    for name, value in schema.items():
        parts = value.values() if name in MAPS and isinstance(value, dict) else value if name in LISTS and isinstance(value, list) else ()
        for part in (value,) if name in SINGLE else parts:
            yield from problems_of(part)
