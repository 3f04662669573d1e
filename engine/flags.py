"""The command line of `python -m engine.serve`: flags from `EngineConfig`, its defaults from a YAML file and from the environment.

    --port 80   beats   ENGINE_PORT=80   beats   port: 80 in --config   beats   the default
"""

import argparse
import difflib
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import configargparse
import msgspec

from engine.config import GIB, KIB, MIB, VERSION, EngineConfig, find_problem

SUFFIXES = {"K": KIB, "M": MIB, "G": GIB}
OTHER_NAMES = {"tp": ["--tensor-parallel-size"], "dp": ["--data-parallel-size"]}

# The groups of --help by their first fields, in the order of the fields.
GROUPS = {
    "model": "model",
    "host": "server",
    "max_model_len": "scheduling",
    "image_cache_bytes": "memory",
    "enforce_eager": "memory",
    "api_arena_bytes": "requests and media",
}
METAVARS = {int: "N", float: "FRACTION", str: "TEXT"}
SUFFIX_METAVARS = {"_bytes": "SIZE", "gpu_memory": "SIZE", "_path": "PATH", "file": "FILE", "_template": "FILE", "_timeout": "SECONDS"}


class Parser(configargparse.ArgumentParser):
    """One line for a mistake, not a page of usage."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: error: {message} (--help lists all flags)\n")
        sys.exit(2)


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
    return parser


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str], groups: Mapping[str, str] = types.MappingProxyType({})) -> None:
    """Of these fields of EngineConfig."""
    group: Any = parser
    hints, defaults = get_type_hints(EngineConfig, include_extras=True), msgspec.structs.asdict(EngineConfig())
    for name in names:
        if name in groups:
            group = parser.add_argument_group(groups[name])
        _add_flag(group, name, hints[name], defaults[name])


def _add_flag(group: Any, name: str, annotated: Any, default: Any) -> None:
    kind, text = get_args(annotated)[:2]
    choices = None
    if get_origin(kind) is types.UnionType:
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if get_origin(kind) is Literal:
        choices, kind = get_args(kind), str
    flags = ["--" + name.replace("_", "-"), *OTHER_NAMES.get(name, [])]
    shown = text if default in (None, "") else f"{text} (default: %(default)s)"
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=default, help=shown)
        return
    metavar = next((word for suffix, word in SUFFIX_METAVARS.items() if name.endswith(suffix)), METAVARS[kind])
    reads = parse_bytes if kind is int and metavar == "SIZE" else kind
    group.add_argument(*flags, dest=name, type=reads, choices=choices, default=default, help=shown, metavar=None if choices else metavar)


def parse_args(argv: list[str] | None = None) -> EngineConfig:
    """Exits with one line that names the flag if a value is bad."""
    parser = make_parser()
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_nearest(parser, unknown[0]))
    values = vars(known)
    values.pop("config")
    positional = values.pop("positional")
    if positional is not None:
        if values["model"] not in (parser.get_default("model"), positional):
            parser.error(f"the model is told twice: {positional} and --model {values['model']}")
        values["model"] = positional
    config = EngineConfig(**values)
    problem = find_problem(config)
    if problem:
        parser.error(problem)
    return config


def _nearest(parser: Parser, word: str) -> str:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
    return f"unknown flag {word}" + (f": did you mean {near[0]}?" if near else "")
