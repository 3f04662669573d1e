"""Formats of matrices: their names in checkpoints, and the classes that store and multiply them. Imports no torch. docs/architecture.md has
the recipe for another one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from models.config.schemes import READERS, SUPPORTED, Quantization, Scheme

Format = str  # a key of FORMATS, or the name of a `Scheme`


class MatrixFormat(NamedTuple):
    """The format in which checkpoints store a matrix, and the format after loading."""

    stored: Format
    final: Format


PLAIN = MatrixFormat("plain", "plain")

METHOD = "quant_method"


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """Line of FORMATS. `storage` and `products` are `module:name` of a `Storage` and of `Products`, see `models.weights.matrix`."""

    storage: str
    products: Mapping[str, str]  # by the name of the backend
    value_bytes: float  # bytes of a stored value with its share of scales
    settings: Mapping[str, Any] = field(default_factory=dict)  # supported values of quantization_config
    required: frozenset[str] = frozenset()  # settings without a default
    capability: tuple[int, int] = (0, 0)  # minimum compute capability

    def runs_on(self, backend: str, capability: tuple[int, int]) -> bool:
        return backend in self.products and capability >= self.capability


FORMATS: Mapping[Format, FormatEntry] = {
    "plain": FormatEntry(
        "models.weights.plain:Plain",
        {
            "torch": "models.weights.plain:TorchPlain",
            "portable": "models.kernels.triton.plain:TritonPlain",
            "hopper": "models.kernels.hopper.few_rows:HopperPlain",
        },
        2,
    ),
    "float8": FormatEntry(
        "models.weights.float8:BlockScaled",
        {
            "torch": "models.weights.float8:TorchFloat8",
            "portable": "models.kernels.triton.float8:TritonFloat8",
            "hopper": "models.kernels.hopper.float8:HopperFloat8",
        },
        1 + 4 / 128**2,
        settings={METHOD: "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"},
        required=frozenset((METHOD, "weight_block_size")),
        capability=(8, 9),
    ),
    "low_bit": FormatEntry(
        "models.weights.low_bit:LowBitKind",
        {
            "torch": "models.weights.low_bit:TorchLowBit",
            "portable": "models.kernels.humming:Humming",
            "hopper": "models.kernels.hopper.int4_gemv:low_bit_products",
        },
        0,
    ),
}


def entry_of(format: Format) -> FormatEntry:
    """Return the line of FORMATS; all low-bit schemes share one line."""
    if (scheme := Scheme.parse(format)) is None:
        return FORMATS[format]
    return replace(FORMATS["low_bit"], value_bytes=scheme.value_bytes)


def final_format(format: Format) -> Format:
    """Return the format of a matrix after loading."""
    scheme = Scheme.parse(format)
    return format if scheme is None else str(scheme.final)


def read_quantization(quantization: Mapping[str, Any] | None) -> Quantization:
    """Return the formats named by a checkpoint's quantization_config. ValueError that lists the supported ones."""
    if quantization is None:
        return Quantization("plain")
    by_method = {entry.settings[METHOD]: name for name, entry in FORMATS.items() if entry.settings}
    if (method := quantization.get(METHOD)) is None:
        raise ValueError(f"quantization_config must name {METHOD}")
    if method in READERS:
        return READERS[method](quantization)
    if method not in by_method:
        known = " or ".join(map(repr, (*by_method, *READERS)))
        raise ValueError(f"quantization_config.{METHOD} must be {known}, got {method!r}; supported are {SUPPORTED}")
    entry = FORMATS[by_method[method]]
    for name, supported in entry.settings.items():
        if (found := quantization.get(name, None if name in entry.required else supported)) != supported:
            raise ValueError(f"quantization_config.{name} must be {supported!r}, got {found!r}")
    return Quantization(by_method[method])
