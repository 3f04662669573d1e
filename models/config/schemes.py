"""Low-bit matrices: names of their formats, and the quantization configs of checkpoints that store them. Imports no torch."""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Json = Mapping[str, Any]

BITS = {"int4": 4, "int8": 8, "float4": 4, "float8": 8}  # float4 is e2m1, float8 is e4m3
GROUPS = (0, 32, 64, 128)  # supported group sizes of integers; 0: whole rows
NVFP4_GROUP = 16
SUPPORTED = (
    "AWQ, GPTQ, compressed-tensors (pack-quantized, float-quantized, nvfp4-pack-quantized), ModelOpt (FP8, NVFP4) and "
    "FP8 in blocks of 128 x 128"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Low-bit values; products take inputs in the model's dtype. Its string is the name of the format, such as `int4-g128-zeros-awq`,
    without the layout if it is the final one."""

    element: str  # a key of BITS
    group: int = 0  # consecutive values of a row that share a scale; 0: the whole row
    has_zeros: bool = False  # whether a group has a zero point; integers without one are symmetric
    layout: str = "final"  # of the tensors, see `models.weights.layouts`; `final`: after loading

    def __str__(self) -> str:
        name = f"{self.element}-g{self.group}" + "-zeros" * self.has_zeros
        return name if self.layout == "final" else f"{name}-{self.layout}"

    @classmethod
    def parse(cls, name: str) -> "Scheme | None":
        """Return the scheme with this name, None for other formats."""
        if (found := re.fullmatch(rf"({'|'.join(BITS)})-g(\d+)(-zeros)?(?:-(\w+))?", name)) is None:
            return None
        return cls(found[1], int(found[2]), found[3] is not None, found[4] or "final")

    @property
    def bits(self) -> int:
        return BITS[self.element]

    @property
    def final(self) -> "Scheme":
        """Return the scheme after loading."""
        return replace(self, layout="final")

    @property
    def value_bytes(self) -> float:
        """Return the bytes of a value with its share of scales and zero points."""
        return self.bits / 8 * (1 + self.has_zeros / self.group) + 2 / self.group if self.group else self.bits / 8


class Rule(NamedTuple):
    """Format of the modules whose whole name matches the regular expression."""

    pattern: str
    format: str


class Quantization(NamedTuple):
    """Formats of a decoder according to its quantization_config: the first matching rule decides, otherwise `format`."""

    format: str
    rules: tuple[Rule, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()  # of tensors: regular expression and replacement
    is_of_all: bool = False  # whether it includes the vision tower and the head, unless a rule excludes them


def _demand(config: Json, **supported: Any) -> None:
    """Raise ValueError if a setting of the configuration differs from the supported value."""
    for name, value in supported.items():
        if config.get(name, value) != value:
            raise ValueError(f"quantization_config.{name} must be {value!r}, got {config[name]!r}; supported are {SUPPORTED}")


def _integer(bits: Any, group: Any, has_zeros: bool, layout: str) -> str:
    group = 0 if group in (None, -1) else group
    if bits not in (4, 8) or group not in GROUPS or (layout == "awq" and bits != 4):
        raise ValueError(f"quantized weights must have 4 or 8 bits and groups of 32, 64, 128 or whole rows, got {bits} and {group}")
    return str(Scheme(f"int{bits}", group, has_zeros, layout))


def read_awq(config: Json) -> Quantization:
    _demand(config, version="gemm")
    return Quantization(_integer(config.get("bits", 4), config.get("group_size", 128), bool(config.get("zero_point", True)), "awq"))


def read_gptq(config: Json) -> Quantization:
    layout = "gptq_v2" if config.get("checkpoint_format") == "gptq_v2" else "gptq"

    def format_of(settings: Json) -> str:
        _demand(settings, desc_act=False)
        return _integer(settings.get("bits"), settings.get("group_size"), True, layout)

    rules = (
        Rule(pattern[2:] + ".*", "plain" if pattern.startswith("-:") else format_of({**config, **changes}))
        for pattern, changes in config.get("dynamic", {}).items()
    )
    return Quantization(format_of(config), tuple(rules))


def read_compressed_tensors(config: Json) -> Quantization:
    rules = [Rule(_pattern(name), "plain") for name in config.get("ignore", ())]
    renames: tuple[tuple[str, str], ...] = ()
    for group in config.get("config_groups", {}).values():
        format = _compressed_format(group.get("format", config.get("format")), group.get("weights", {}))
        if format == "float8":
            renames = ((r"\.weight_scale$", ".weight_scale_inv"),)
        rules += [Rule(".*" if target == "Linear" else _pattern(target), format) for target in group.get("targets", ())]
    rules.sort(key=lambda rule: rule.pattern == ".*")  # names before the class of all modules
    if not rules or rules[-1].format == "plain":
        raise ValueError(f"quantization_config.config_groups names no weights; supported are {SUPPORTED}")
    return Quantization(rules[-1].format, (*rules, Rule(".*", "plain")), renames, is_of_all=True)


def _compressed_format(name: object, weights: Json) -> str:
    """Return the format of a group of compressed-tensors."""
    strategy, bits, kind = weights.get("strategy"), weights.get("num_bits"), weights.get("type", "int")
    if name == "pack-quantized" and kind == "int" and strategy in ("group", "channel"):
        if weights.get("actorder", "static") not in ("static", "weight"):
            raise ValueError(f"quantization_config.actorder must be 'static', got {weights['actorder']!r}")
        return _integer(bits, weights.get("group_size") if strategy == "group" else 0, not weights.get("symmetric", True), "packed")
    if name == "float-quantized" and kind == "float" and bits == 8:
        if strategy in ("channel", "tensor"):
            return str(Scheme("float8", layout="float8" if strategy == "channel" else "float8_tensor"))
        if strategy == "block" and weights.get("block_structure") == [128, 128]:
            return "float8"
    if name == "nvfp4-pack-quantized" and weights.get("group_size") == NVFP4_GROUP:
        return str(Scheme("float4", NVFP4_GROUP, layout="nvfp4"))
    raise ValueError(f"quantization_config has {name} with {bits} bits of {kind} by {strategy}; supported are {SUPPORTED}")


def read_modelopt(config: Json) -> Quantization:
    algorithms = {"FP8": Scheme("float8", layout="float8_scalar"), "NVFP4": Scheme("float4", NVFP4_GROUP, layout="modelopt_fp4")}
    algorithm = config.get("quant_algo", "")
    if (scheme := algorithms.get(algorithm)) is None:
        raise ValueError(f"quantization_config.quant_algo must be FP8 or NVFP4, got {algorithm!r}; supported are {SUPPORTED}")
    ignored = (*config.get("ignore", ()), *config.get("exclude_modules", ()))
    return Quantization(str(scheme), tuple(Rule(fnmatch.translate(name), "plain") for name in ignored), is_of_all=True)


READERS = {"awq": read_awq, "gptq": read_gptq, "compressed-tensors": read_compressed_tensors, "modelopt": read_modelopt}


def _pattern(name: str) -> str:
    """Return a regular expression for the module names that compressed-tensors means by this name."""
    return f"(?:{name[3:]}).*" if name.startswith("re:") else re.escape(name)
