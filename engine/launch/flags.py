"""Command line of `python -m engine.serve`: flags from `EngineConfig`, with defaults from a YAML file and from the environment.

--port 80   beats   ENGINE_PORT=80   beats   port: 80 in --config   beats   the default
"""

import argparse
import contextlib
import difflib
import functools
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import configargparse

from engine.launch.compat import ADVICE, BY_NAME, FLAGS, SAME_VALUES, settle
from engine.launch.config import GIB, KIB, MIB, VERSION, EngineConfig, Words, find_problems, read_variables

SUFFIXES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": KIB, "M": MIB, "G": GIB}
PROGRAM = "engine.serve"
NEGATIONS = ("--no-", "--disable-", "--without-")

# Groups of --help: first field of each group, in the order of the fields.
GROUPS = {
    "model": "model",
    "host": "server",
    "max_model_len": "scheduling",
    "image_cache_bytes": "memory",
    "enforce_eager": "execution",
    "api_arena_bytes": "requests and media",
}
COMMON = (  # flags of `--help` without `all`
    "model", "served_model_name", "load_format", "quantization", "device", "tp", "dp", "host", "port", "api_key", "max_model_len",
    "max_num_seqs", "draft", "gpu_memory_utilization", "plan",
)  # fmt: skip
HELP_WIDTH = 110
HINTS, DEFAULTS = get_type_hints(EngineConfig, include_extras=True), EngineConfig()
LISTS: dict[str, Words] = {name: parts[2] for name, hint in HINTS.items() if len(parts := get_args(hint)) > 2}
METAVARS = {int: "N", float: "FRACTION", str: "TEXT"}
SUFFIX_METAVARS = {"_bytes": "SIZE", "_memory": "SIZE", "_path": "PATH", "file": "FILE", "_template": "FILE", "_timeout": "SECONDS"}


class BadFlags(ValueError):
    """Error in the flags, as one line."""


class HelpFormatter(argparse.HelpFormatter):
    """Show flags without their aliases, which docs/flags.md lists."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=HELP_WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar)
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"{action.option_strings[0]}, --no-{action.option_strings[0][2:]}"
        return " ".join([action.option_strings[0], *([str(action.metavar)] if action.metavar else [])])


class HelpAction(argparse.Action):
    """`--help` shows the most common flags, `--help all` all flags."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, option_string: str | None = None) -> NoReturn:
        if values == "all":
            parser.print_help()
        else:
            formatter = parser._get_formatter()
            formatter.add_usage(parser.usage, [], [])
            formatter.add_text(parser.description)
            formatter.add_arguments([action for action in parser._actions if action.dest in (*COMMON, "help")])
            formatter.add_text("docs/flags.md explains all flags.")
            print(formatter.format_help(), end="")
        parser.exit()


class Parser(configargparse.ArgumentParser):
    """Parser that raises BadFlags for an error instead of printing its usage. `problems`: invalid values so far."""

    problems: list[str]

    def error(self, message: str) -> NoReturn:
        raise BadFlags("; ".join([*self.problems, message]))

    def get_possible_config_keys(self, action: argparse.Action) -> list[str]:
        """Return configargparse's keys, and `max_num_seqs` for `max-num-seqs`."""
        keys: list[str] = super().get_possible_config_keys(action)
        return keys + [key.replace("-", "_") for key in keys if not key.startswith("-") and "-" in key]


def shown_default(value: object, metavar: str) -> str:
    """Format a default for the help: 536870912 -> '512M', True -> 'on'."""
    if isinstance(value, bool):
        return "on" if value else "off"
    suffix = next((suffix for suffix in "GMK" if metavar == "SIZE" and int(str(value)) % SUFFIXES[suffix] == 0), "")
    return f"{int(str(value)) // SUFFIXES[suffix]}{suffix}" if suffix else str(value)


def parse_number(text: str) -> int:
    """Parse a number as vLLM does: '32k' -> 32000, '32K' -> 32768. Raises ValueError."""
    return int(float(text[:-1]) * SUFFIXES[text[-1:]]) if text[-1:] in SUFFIXES else int(text)


def make_parser() -> Parser:
    parser = Parser(
        PROGRAM, usage="%(prog)s [MODEL] [--flag VALUE ...]", allow_abbrev=False,
        description="Serve a vision-language model behind an OpenAI-compatible API. Environment variables set flags, too: ENGINE_PORT.",
        formatter_class=HelpFormatter, add_help=False,
        config_file_parser_class=configargparse.YAMLConfigFileParser, auto_env_var_prefix="ENGINE_", add_env_var_help=False,
        add_config_file_help=False,
    )  # fmt: skip
    parser.problems = []
    how = {"nargs": "?", "metavar": "all", "default": argparse.SUPPRESS, "action": HelpAction}
    parser.add_argument("--help", "-h", help="show common flags, or all", **how)
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument("--config", is_config_file=True, metavar="FILE", help="YAML file of flags, as `max-num-seqs: 64`")
    parser.add_argument("--version", action="version", version=VERSION)
    add_flags(parser, EngineConfig.__struct_fields__, GROUPS, parser.problems)
    _add_flags_of_others(parser)
    return parser


def add_flags(
    parser: argparse.ArgumentParser,
    names: Sequence[str],
    groups: Mapping[str, str] = types.MappingProxyType({}),
    problems: list[str] | None = None,
) -> None:
    """Add flags for these fields of EngineConfig."""
    group: Any = parser
    for name in names:
        if name in groups:
            group = parser.add_argument_group(groups[name])
        _add_flag(group, name, problems)


def _add_flags_of_others(parser: Parser) -> None:
    """Add the flags of other servers that are not names of our fields; --help omits them. `settle` removes their values, all lists, from
    the result."""
    for flag in FLAGS:
        for name in flag.names:
            if flag.field and flag.values != ("",):
                const, kind = flag.values == ("on",), {"dest": flag.field, "action": "store_const"}
                parser.add_argument(name, const=const, help=argparse.SUPPRESS, **kind)
            elif (flag.rule, flag.values) == ("ok", ("",)):
                parser.add_argument(name, dest=name, action="store_const", const=[None], help=argparse.SUPPRESS)
            elif not flag.field:
                parser.add_argument(name, dest=name, action="append", nargs="*" if flag.rule == "no" else None, help=argparse.SUPPRESS)


def _add_flag(group: Any, name: str, problems: list[str] | None) -> None:
    (kind, text, *_), default = get_args(HINTS[name]), getattr(DEFAULTS, name)
    choices: tuple[str, ...] = ()
    if get_origin(kind) is types.UnionType:
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if get_origin(kind) is Literal:
        choices, kind = get_args(kind), str
    others = (other for flag in FLAGS if flag.field == name and flag.values == ("",) for other in flag.names)
    flags = ["--" + name.replace("_", "-"), *others]
    metavar = next((word for suffix, word in SUFFIX_METAVARS.items() if name.endswith(suffix)), METAVARS.get(kind, ""))
    shown = text if default in (None, "") else f"{text}; default: {shown_default(default, metavar)}"
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=default, help=shown)
        return
    reads: Any = kind
    if kind is int and (metavar == "SIZE" or name.endswith(("_len", "_tokens"))):
        reads = parse_number
    if kind is str:
        reads = functools.partial(_read_text, name, choices)
    group.add_argument(
        *flags, dest=name, nargs="+" if name in LISTS else None, type=functools.partial(_note, problems, flags[0], reads),
        default=default, help=shown, metavar=f"{{{','.join(choices)}}}" if choices else metavar,
    )  # fmt: skip


def _note(problems: list[str] | None, flag: str, read: Callable[[str], Any], text: str) -> Any:
    """Convert a value; errors are added to `problems`, so that all are reported together."""
    try:
        return read(text)
    except ValueError as problem:
        reason = f"{flag} {text}: {problem if isinstance(problem, BadFlags) else 'not a number'}"
        if problems is None:
            raise argparse.ArgumentTypeError(reason) from None
        problems.append(reason)


def _read_text(name: str, choices: Sequence[str], text: str) -> str:
    """Parse a value as vLLM and SGLang do. Raises BadFlags."""
    if name.startswith("allowed_") and text.startswith("["):
        with contextlib.suppress(ValueError):
            return ",".join(json.loads(text))
    text = SAME_VALUES.get((name, text), text)
    if choices and text not in choices:
        raise BadFlags(f"choose from {', '.join(choices)}" + (f"; {ADVICE[name]}" if name in ADVICE else ""))
    return text


def parse_args(argv: list[str] | None = None) -> EngineConfig:
    """Parse the flags, or exit with one line that names the bad ones. Notes on compatibility flags are written to stderr."""
    try:
        config, notes = read_flags(sys.argv[1:] if argv is None else argv)
    except BadFlags as problem:
        sys.stderr.write(f"{PROGRAM}: error: {problem} (--help all lists all flags)\n")
        sys.exit(2)
    for note in notes:
        sys.stderr.write(f"{PROGRAM}: {note}\n")
    return config


def read_flags(argv: list[str]) -> tuple[EngineConfig, list[str]]:
    """Return the configuration and a line for each flag without effect. Raises BadFlags."""
    parser = make_parser()
    parser.set_defaults(model=None)  # until it is known whether the model is given otherwise
    known, unknown = parser.parse_known_args(_rewrite(argv))
    values = vars(known)
    notes, problems = settle(values)
    problems = parser.problems + problems
    if unknown:
        problems += [_nearest(parser, word) for word in unknown if word.startswith("-")] or [f"unknown argument {unknown[0]}"]
    if problems:
        raise BadFlags("; ".join(problems))
    values.pop("config")
    positional = values.pop("positional")
    for name, (separator, marks) in LISTS.items():
        given = values[name] or []
        ends = len(given) > 1 and not set(marks) & set(given[-1])
        if ends and positional is None and values["model"] is None:
            positional = given.pop()  # `--served-model-name x MODEL`
        values[name] = separator.join(given) or None
    if positional is not None and values["model"] not in (None, positional):
        raise BadFlags(f"the model is given twice: {positional} and --model {values['model']}")
    values["model"] = positional or values["model"] or DEFAULTS.model
    config = EngineConfig(**values)
    if problems := list(find_problems(config)):
        raise BadFlags("; ".join(problems))
    strangers = sorted(read_variables() - {action.env_var for action in parser._actions if action.env_var})
    return config, notes + [f"{name} is not the variable of any flag" for name in strangers]


def _rewrite(argv: Sequence[str]) -> list[str]:
    """`--max_num_seqs=4` is `--max-num-seqs=4`; `--name.key.inner 4` is `--name {"key": {"inner": 4}}`; `--ep 8` is `--ep-size=8`."""
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        name, *keys = name.split(".") if name.startswith("--") else [name]
        name = name.replace("_", "-") if name.startswith("--") else name
        if words[-1:] == ["--ep"] and word.isdigit():
            words[-1] = f"--ep-size={word}"
        elif keys and (name in BY_NAME or name == "--default-chat-template-kwargs"):
            text: Any = value if equals else next(rest, "")
            with contextlib.suppress(ValueError):
                text = json.loads(text)
            words += [name, json.dumps(functools.reduce(lambda inner, key: {key: inner}, reversed(keys), text))]
        else:
            words.append(".".join(["--ep-size" if name == "--ep" and equals else name, *keys]) + equals + value)
    return words


def _nearest(parser: Parser, word: str) -> str:
    """Return the most similar flag, never an unsupported or opposite one."""
    name = word.partition("=")[0]
    refused = {name for name, flag in BY_NAME.items() if flag.rule == "no"}
    flags = [flag for action in parser._actions for flag in action.option_strings if _is_negation(flag) == _is_negation(name)]
    flags = [flag for flag in flags if flag not in refused]
    near = difflib.get_close_matches(name, flags, n=1)
    return f"unknown flag {name}" + (f": did you mean {near[0]}?" if near else "")


def _is_negation(flag: str) -> bool:
    return flag.startswith(NEGATIONS)
