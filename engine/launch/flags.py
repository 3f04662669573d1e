"""Command line of `python -m engine.serve`: flags from `EngineConfig`. The environment sets flags, too: ENGINE_PORT=80 is `--port 80`."""

import argparse
import contextlib
import functools
import json
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from engine.launch.compat import BadFlags, translate
from engine.wire.config import GIB, KIB, MIB, VERSION, EngineConfig, find_problems, read_variables

SUFFIXES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": KIB, "M": MIB, "G": GIB}
PROGRAM = "engine.serve"

# Groups of --help: first field of each group, in the order of the fields.
GROUPS = {
    "model": "model",
    "host": "server",
    "max_model_len": "scheduling",
    "image_cache_bytes": "memory",
    "enforce_eager": "execution",
    "api_arena_bytes": "requests and media",
}
HINTS, DEFAULTS = get_type_hints(EngineConfig, include_extras=True), EngineConfig()
SEPARATORS = {"served_model_name": ",", "lora_modules": " "}  # of fields with several words
SAME_VALUES = {  # aliases of choices
    "float": "float32", "bf16": "bfloat16", "safetensors": "auto", "ngram": "lookup", "suffix": "lookup", "nextn": "mtp",
    "qwen3_next_mtp": "mtp", "qwen3_5_mtp": "mtp",
}  # fmt: skip
METAVARS = {int: "N", float: "FRACTION", str: "TEXT"}


class Parser(argparse.ArgumentParser):
    """Parser that raises BadFlags for an error instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise BadFlags(message)


def parse_number(text: str) -> int:
    """Parse a number as vLLM does: '32k' -> 32000, '32K' -> 32768."""
    try:
        return int(float(text[:-1]) * SUFFIXES[text[-1:]]) if text[-1:] in SUFFIXES else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def make_parser() -> Parser:
    parser = Parser(
        PROGRAM, usage="%(prog)s [MODEL] [--flag VALUE ...]", allow_abbrev=False,
        description="Serve a vision-language model behind an OpenAI-compatible API. Environment variables set flags, too: ENGINE_PORT.",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=34, width=110),
    )  # fmt: skip
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument("--version", action="version", version=VERSION)
    add_flags(parser, EngineConfig.__struct_fields__)
    return parser


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add flags for these fields of EngineConfig."""
    group: Any = parser
    for name in names:
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        group.add_argument("--" + name.replace("_", "-"), dest=name, **_argument(name))


def _argument(name: str) -> dict[str, Any]:
    (kind, text, *_), default = get_args(HINTS[name]), getattr(DEFAULTS, name)
    if get_origin(kind) is types.UnionType:
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if default not in (None, ""):
        text += f"; default: {'on' if default is True else 'off' if default is False else default}"
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "default": default, "help": text}
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    read = functools.partial(_read_text, name, choices) if kind is str or choices else parse_number if kind is int else kind
    metavar = f"{{{','.join(choices)}}}" if choices else METAVARS[kind]
    return {"nargs": "+" if name in SEPARATORS else None, "type": read, "default": default, "help": text, "metavar": metavar}


def _read_text(name: str, choices: Sequence[str], text: str) -> str:
    """Parse a value as vLLM and SGLang do."""
    if name.startswith("allowed_") and text.startswith("["):
        with contextlib.suppress(ValueError):
            return ",".join(json.loads(text))
    if choices and (text := SAME_VALUES.get(text.lower(), text.lower())) not in choices:
        raise argparse.ArgumentTypeError(f"{text} is not one of {', '.join(choices)} ({get_args(HINTS[name])[1]})")
    return text


def parse_args(argv: list[str] | None = None) -> EngineConfig:
    """Parse the flags, or exit with one line that names the bad ones. Notes on compatibility flags are written to stderr."""
    try:
        config, notes = read_flags(sys.argv[1:] if argv is None else argv)
    except BadFlags as problem:
        sys.stderr.write(f"{PROGRAM}: error: {problem} (--help lists all flags)\n")
        sys.exit(2)
    for note in notes:
        sys.stderr.write(f"{PROGRAM}: {note}\n")
    return config


def read_flags(argv: Sequence[str]) -> tuple[EngineConfig, list[str]]:
    """Return the configuration and notes on flags and variables without effect. Raises BadFlags."""
    parser, (words, strangers), (given, unused) = make_parser(), variable_words(EngineConfig.__struct_fields__), translate(argv)
    parser.set_defaults(model=None)  # until it is known whether the model is given otherwise
    result, unknown = parser.parse_known_args([*words, *given])
    if unknown:
        raise BadFlags(f"unknown argument {unknown[0].partition('=')[0]}")
    values = vars(result)
    positional = values.pop("positional")
    for name, separator in SEPARATORS.items():
        values[name] = separator.join(values[name] or ()) or None
    if positional is not None and values["model"] not in (None, positional):
        raise BadFlags(f"the model is given twice: {positional} and --model {values['model']}")
    values["model"] = positional or values["model"] or DEFAULTS.model
    config = EngineConfig(**values)
    if problems := list(find_problems(config)):
        raise BadFlags("; ".join(problems))
    notes = [f"flags without effect: {', '.join(sorted(unused))} (docs/moving.md)"] if unused else []
    return config, notes + [f"{name} is not the variable of any flag" for name in strangers]


def variable_words(fields: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags that environment variables set, and the names of other variables."""
    variables = {name.removeprefix("ENGINE_").lower(): value for name, value in read_variables().items()}
    flags = {name: variables[name] for name in variables.keys() & fields}
    switches = {name: text.lower() not in ("0", "false", "no", "off") for name, text in flags.items() if get_args(HINTS[name])[0] is bool}
    return words_of(flags | switches), sorted(f"ENGINE_{name.upper()}" for name in variables.keys() - fields)


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Format values as a command line: `prefix_cache=False` is `--no-prefix-cache`, a dictionary is JSON, None nothing."""
    words: list[str] = []
    for name, value in ((name.replace("_", "-"), value) for name, value in flags.items()):
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{name}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, Mapping) else ",".join(value) if isinstance(value, list | tuple) else value
            words.append(f"--{name}={text}")
    return words
