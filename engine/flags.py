"""The command line of `python -m engine.serve`: flags from `EngineConfig`, its defaults from a YAML file and from the environment.

--port 80   beats   ENGINE_PORT=80   beats   port: 80 in --config   beats   the default
"""

import argparse
import contextlib
import difflib
import functools
import json
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import configargparse
import msgspec

from engine.config import GIB, KIB, MIB, VERSION, EngineConfig, find_problem, read_variables
from engine.moving import OTHER_VALUES, OTHERS_BY_NAME, READ, REFUSED_VALUES, SAME, read_json

SUFFIXES = {"K": KIB, "M": MIB, "G": GIB}
DOTTED = {read.name for read in READ} | OTHERS_BY_NAME.keys()  # whose values may be JSON
NEGATIONS = ("--no-", "--disable-", "--without-")

# The groups of --help by their first fields, in the order of the fields.
GROUPS = {
    "model": "model",
    "host": "server",
    "max_model_len": "scheduling",
    "image_cache_bytes": "memory",
    "enforce_eager": "execution",
    "api_arena_bytes": "requests and media",
}
METAVARS = {int: "N", float: "FRACTION", str: "TEXT"}
SUFFIX_METAVARS = {"_bytes": "SIZE", "gpu_memory": "SIZE", "_path": "PATH", "file": "FILE", "_template": "FILE", "_timeout": "SECONDS"}


class BadFlags(ValueError):
    """In one line."""


class Parser(configargparse.ArgumentParser):
    """A mistake is a BadFlags, not a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise BadFlags(message)

    def get_possible_config_keys(self, action: argparse.Action) -> list[str]:
        """Those of configargparse, and `max_num_seqs` for `max-num-seqs`."""
        keys: list[str] = super().get_possible_config_keys(action)
        return keys + [key.replace("-", "_") for key in keys if not key.startswith("-") and "-" in key]


def parse_bytes(text: str) -> int:
    """'512M' -> 536870912. Raises ValueError."""
    factor = SUFFIXES.get(text[-1:].upper())
    return int(float(text[:-1]) * factor) if factor else int(text)


def make_parser() -> Parser:
    parser = Parser(
        "engine.serve", usage="%(prog)s [MODEL] [--flag VALUE ...]", allow_abbrev=False,
        description="Serve a vision-language model behind an OpenAI-compatible API. The environment may hold flags too, as ENGINE_PORT.",
        config_file_parser_class=configargparse.YAMLConfigFileParser, auto_env_var_prefix="ENGINE_", add_env_var_help=False,
    )  # fmt: skip
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument("--config", is_config_file=True, metavar="FILE", help="YAML file of flags, as `max-num-seqs: 64`")
    parser.add_argument("--version", action="version", version=VERSION)
    add_flags(parser, EngineConfig.__struct_fields__, GROUPS)
    _add_flags_of_others(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str], groups: Mapping[str, str] = types.MappingProxyType({})) -> None:
    """Of these fields of EngineConfig."""
    group: Any = parser
    hints, defaults = get_type_hints(EngineConfig, include_extras=True), msgspec.structs.asdict(EngineConfig())
    for name in names:
        if name in groups:
            group = parser.add_argument_group(groups[name])
        _add_flag(group, name, hints[name], defaults[name])


def _add_flags_of_others(parser: Parser) -> None:
    """Those that are no names of our fields: `_settle` takes their values out again. None is in --help."""
    for same in SAME:
        if same.const is not None:
            parser.add_argument(*same.names, action="store_const", dest=same.field, const=same.const, help=argparse.SUPPRESS)
    for read in READ:
        parser.add_argument(read.name, dest=read.name, action="append", default=[], help=argparse.SUPPRESS)
    for name, other in OTHERS_BY_NAME.items():
        if other.values == () and not other.is_refused:
            parser.add_argument(name, action="store_true", dest=name, help=argparse.SUPPRESS)
        else:
            parser.add_argument(name, dest=name, nargs="*" if other.is_refused else None, help=argparse.SUPPRESS)


def _add_flag(group: Any, name: str, annotated: Any, default: Any) -> None:
    kind, text = get_args(annotated)[:2]
    choices = None
    if get_origin(kind) is types.UnionType:
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if get_origin(kind) is Literal:
        choices, kind = get_args(kind), str
    flags = ["--" + name.replace("_", "-"), *(other for same in SAME if same.field == name and same.const is None for other in same.names)]
    shown = text if default in (None, "") else f"{text} (default: %(default)s)"
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=default, help=shown)
        return
    metavar = next((word for suffix, word in SUFFIX_METAVARS.items() if name.endswith(suffix)), METAVARS[kind])
    reads: Any = parse_bytes if kind is int and metavar == "SIZE" else kind
    if kind is str:
        reads = functools.partial(_read_text, name)
    group.add_argument(
        *flags, dest=name, nargs="+" if name == "served_model_name" else None, type=reads, choices=choices, default=default, help=shown,
        metavar=None if choices else metavar,
    )  # fmt: skip


def _read_text(name: str, text: str) -> str:
    """As vLLM and SGLang would read it."""
    if problem := REFUSED_VALUES.get((name, text)):
        raise argparse.ArgumentTypeError(f"{text}: {problem}")
    if name.startswith("allowed_") and text.startswith("["):
        with contextlib.suppress(ValueError):
            return ",".join(json.loads(text))
    return OTHER_VALUES.get((name, text), text)


def parse_args(argv: list[str] | None = None) -> EngineConfig:
    """Exits with one line that names the flags if any are bad. What flags of others have come to is said on stderr."""
    name = make_parser().prog
    try:
        config, notes = read_flags(sys.argv[1:] if argv is None else argv)
    except BadFlags as problem:
        sys.stderr.write(f"{name}: error: {problem} (--help lists all flags)\n")
        sys.exit(2)
    for note in notes:
        sys.stderr.write(f"{name}: {note}\n")
    return config


def read_flags(argv: list[str]) -> tuple[EngineConfig, list[str]]:
    """And a line for whatever has no effect. Raises BadFlags."""
    parser = make_parser()
    words = _without_dots(argv)
    known, unknown = parser.parse_known_args(words)
    values = vars(known)
    notes, problems = _settle(values)
    if unknown:
        problems += [_nearest(parser, word) for word in unknown if word.startswith("-")] or [f"unknown word {unknown[0]}"]
    if problems:
        raise BadFlags("; ".join(problems))
    values.pop("config")
    positional = values.pop("positional")
    names = values["served_model_name"] or []
    if len(names) > 1 and positional is None and not _is_model_told(parser, words, values):
        positional = names.pop()  # `--served-model-name x MODEL`
    values["served_model_name"] = ",".join(names) or None
    if positional is not None:
        if values["model"] not in (parser.get_default("model"), positional):
            raise BadFlags(f"the model is told twice: {positional} and --model {values['model']}")
        values["model"] = positional
    config = EngineConfig(**values)
    problem = find_problem(config)
    if problem:
        raise BadFlags(problem)
    strangers = sorted(read_variables() - {action.env_var for action in parser._actions if action.env_var})
    return config, notes + [f"{name} is the variable of no flag" for name in strangers]


def _is_model_told(parser: Parser, words: list[str], values: dict[str, Any]) -> bool:
    flags = {flag for action in parser._actions if action.dest == "model" for flag in action.option_strings}
    return values["model"] != parser.get_default("model") or any(word.partition("=")[0] in flags for word in words)


def _without_dots(argv: list[str]) -> list[str]:
    """`--max_num_seqs=4` is `--max-num-seqs=4`; of a flag of others, `--name.key.inner 4` is `--name {"key": {"inner": 4}}`."""
    words, rest = [], iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        name, *keys = name.split(".") if name.startswith("--") else [name]
        name = name.replace("_", "-") if name.startswith("--") else name
        if not keys or name not in DOTTED:
            words.append(".".join([name, *keys]) + equals + value)
            continue
        text: Any = value if equals else next(rest, "")
        with contextlib.suppress(ValueError):
            text = json.loads(text)
        words += [name, json.dumps(functools.reduce(lambda inner, key: {key: inner}, reversed(keys), text))]
    return words


def _settle(values: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Takes out of the parser's values what is no field of ours. Returns what to say of it, and what is wrong with it."""
    notes, problems = [], []
    for read in READ:
        for text in values.pop(read.name):
            try:
                values |= read_json(read.name, text)
            except ValueError as problem:
                problems.append(str(problem))
    for name, other in OTHERS_BY_NAME.items():
        value = values.pop(name)
        if value in (None, False):
            continue
        if other.is_refused:
            problems.append(f"{name} is not supported: {other.text}")
        elif value is not True and other.values is not None and value not in other.values:
            problems.append(f"{name} {value} is not supported: {other.text}")
        else:
            notes.append(f"{name} has no effect: {other.text}")
    return notes, problems


def _nearest(parser: Parser, word: str) -> str:
    """Never a flag that says the opposite."""
    name = word.partition("=")[0]
    flags = [flag for action in parser._actions for flag in action.option_strings if _is_negation(flag) == _is_negation(name)]
    near = difflib.get_close_matches(name, flags, n=1)
    return f"unknown flag {name}" + (f": did you mean {near[0]}?" if near else "")


def _is_negation(flag: str) -> bool:
    return flag.startswith(NEGATIONS)
