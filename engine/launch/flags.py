"""Command line of `python -m engine.serve`: flags from `EngineConfig`. The environment sets flags, too: ENGINE_PORT=80 is `--port 80`."""

import argparse
import contextlib
import functools
import json
import sys
import types
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from engine.launch.compat import ALIASES, KEYS, NAMES, add_compatible
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
SAME_VALUES = {  # aliases
    ("dtype", "float"): "float32", ("load_format", "safetensors"): "auto", ("kv_cache_dtype", "bf16"): "bfloat16",
    ("draft", "NEXTN"): "mtp", ("draft", "NGRAM"): "lookup", ("draft", "EAGLE3"): "eagle3",
}  # fmt: skip
METAVARS = {int: "N", float: "FRACTION", str: "TEXT"}


class BadFlags(ValueError):
    """Error in the flags, as one line."""


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
    hidden = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for name, (field, _, value) in ((name, field.partition("=")) for name, field in ALIASES.items()):
        how = {"action": "store_const", "const": value == "on"} if value else _argument(field)
        parser.add_argument(name, dest=field, **(how | hidden))
    add_compatible(parser)
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
    text = SAME_VALUES.get((name, text), text)
    if choices and text not in choices:
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
    parser, (words, strangers) = make_parser(), variable_words(EngineConfig.__struct_fields__)
    parser.set_defaults(model=None)  # until it is known whether the model is given otherwise
    result, unknown = parser.parse_known_args([*words, *_rewrite(argv)], argparse.Namespace(unused=set()))
    if unknown:
        raise BadFlags(f"unknown argument {unknown[0].partition('=')[0]}")
    values = vars(result)
    positional, unused = values.pop("positional"), values.pop("unused")
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
    words = []
    for name in variables.keys() & fields:
        is_off = get_args(HINTS[name])[0] is bool and variables[name].lower() in ("0", "false", "no", "off")
        flag = f"--{'no-' if is_off else ''}{name.replace('_', '-')}"
        words.append(flag if get_args(HINTS[name])[0] is bool else f"{flag}={variables[name]}")
    return words, sorted(f"ENGINE_{name.upper()}" for name in variables.keys() - fields)


def _rewrite(argv: Sequence[str]) -> list[str]:
    """`--max_num_seqs=4` is `--max-num-seqs=4`, `--ep 8` is `--ep`, `--name.key.inner 4` is `--name {"key": {"inner": 4}}`. Drop such keys
    of flags without effect."""
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if words[-1:] == ["--ep"] and word.isdigit():
            words[-1] = "--no-ep" if word == "1" else "--ep"
            continue
        bare, *keys = name.split(".") if name.startswith("--") else [name]
        if (bare := bare.replace("_", "-") if name.startswith("--") else bare) in KEYS and keys:
            inner: Any = value if equals else next(rest, "")
            with contextlib.suppress(ValueError):
                inner = json.loads(inner)
            words += [bare, json.dumps(functools.reduce(lambda found, key: {key: found}, reversed(keys), inner))]
            continue
        name = bare if bare in NAMES else ".".join([bare, *keys])
        words.append(name + equals + value)
    return words
