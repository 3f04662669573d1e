"""Guest that compiles grammars: it answers a Grammar with a Compiled."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import xgrammar

from engine.grammar.client import Compiled
from engine.grammar.schema import check
from engine.grammar.vocabulary import read_vocabulary
from engine.wire.grammar import Grammar

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


def prepare(model_folder: str) -> Callable[[bytes], bytes]:
    """Return the guest's function."""
    compiler = xgrammar.GrammarCompiler(read_vocabulary(Path(model_folder)), max_threads=NUM_THREADS, cache_enabled=False)
    return lambda job: msgspec.msgpack.encode(compiled(compiler, msgspec.msgpack.decode(job, type=Grammar)))


def compiled(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> Compiled:
    kinds: dict[str, Callable[[str], str | xgrammar.Grammar]] = {
        "json_schema": lambda text: schema_grammar(msgspec.json.decode(text)),
        "regex": xgrammar.Grammar.from_regex,
        "ebnf": ebnf_of,
        "choice": lambda text: "root ::= " + " | ".join(quoted(choice) for choice in msgspec.json.decode(text, type=list[str])),
        "structural_tag": lambda text: xgrammar.Grammar.from_structural_tag(with_ebnf(text)),
    }
    try:
        done = compiler.compile_grammar(kinds[grammar.kind](grammar.text))
        return Compiled(done.serialize_json().encode())
    except (RuntimeError, ValueError, TypeError, MemoryError, msgspec.DecodeError) as problem:
        return Compiled(error=PLACE_IN_SOURCE.sub("", str(problem)).strip()[:MAX_REASON] or "the grammar takes too much memory to compile")


def quoted(choice: str) -> str:
    """Return a choice as JSON, which is valid EBNF."""
    return json.dumps(choice, ensure_ascii=False)


def schema_grammar(schema: object, separators: tuple[str, str] = (",", ":")) -> xgrammar.Grammar:
    """Return the grammar of a schema without other white space, which a model could repeat forever. Raises ValueError."""
    check(schema)
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, separators=separators)
    return xgrammar.Grammar.from_ebnf(bounded(grammar))


def bounded(grammar: xgrammar.Grammar) -> str:
    """Return the EBNF of a schema's grammar with two corrections: a model cannot repeat the digits of a number forever, and strings of
    bounded length have no control characters, which JSON forbids."""
    text = BOUNDED.sub(lambda match: match[1] + PLAIN, str(grammar))
    digits = {"[0-9]", *DIGIT_RULE.findall(text)}

    def limit(match: re.Match[str]) -> str:
        least = int(match["least"] or 0)
        return f"{match['rule']}{{{least}, {max(least, MAX_DIGITS)}}}" if match["rule"] in digits else match[0]

    return UNBOUNDED.sub(limit, text)


def ebnf_of(grammar: str) -> str:
    """Return EBNF from EBNF or Lark, also in guidance's form. ValueError for the attribute `temperature`, which sampling does not apply."""
    if EBNF_RULE.search(grammar) or not LARK_RULE.search(grammar):
        return grammar
    bare = LLGUIDANCE.sub("", grammar).replace("(?s:.*)", r"(.|\n)*")
    schemas: dict[str, xgrammar.Grammar | str] = {}
    while found := LARK_SCHEMA.search(bare):
        schema, end = json.JSONDecoder().raw_decode(bare, found.end())
        name = f"schema_{len(schemas)}"
        schemas[name] = lark_schema(schema)
        bare = f"{bare[: found.start()]}@{name}{bare[end:]}"
    ebnf = str(xgrammar.Grammar.from_lark(bare, named_grammars=schemas))
    if TEMPERATURE.search(ebnf):
        raise ValueError("the attribute 'temperature' of a Lark rule is not supported")
    return ebnf


def lark_schema(schema: dict[str, object]) -> xgrammar.Grammar:
    """Return the grammar of a schema with the separators that its `x-guidance` member asks for, by default without white space."""
    spaces = schema.pop("x-guidance", {})
    options = spaces if isinstance(spaces, dict) else {}
    return schema_grammar(schema, (str(options.get("item_separator", ",")), str(options.get("key_separator", ":"))))


def with_ebnf(tag: str) -> str:
    """Return a structural tag whose grammars and schemas are EBNF."""

    def walked(value: object) -> object:
        if isinstance(value, list):
            return [walked(one) for one in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == "grammar" and isinstance(value.get("grammar"), str):
            return value | {"grammar": ebnf_of(value["grammar"])}
        if "json_schema" in value:
            alone = {"type": "structural_tag", "format": value}
            return {"type": "grammar", "grammar": bounded(xgrammar.Grammar.from_structural_tag(json.dumps(alone)))}
        return {name: walked(one) for name, one in value.items()}

    return json.dumps(walked(json.loads(tag)))
