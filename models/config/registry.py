"""Registry of architectures by `model_type`: layout of the files and model class. Imports no torch."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from models.config.cosmos3 import COSMOS3_DROPPED, COSMOS3_FILES, COSMOS3_RENAMES


@dataclass(frozen=True, slots=True)
class Architecture:
    model: str  # `module:name` of the class, see `models.decoders.contract`
    weight_files: tuple[str, ...] = ("model*.safetensors",)  # patterns of paths in the folder; an index takes precedence
    renames: tuple[tuple[str, str], ...] = ()  # regular expression and replacement
    dropped: str = ""  # matching tensors are not part of the model
    head: str = ""  # path of the prediction head, which is read only if it is used
    has_tower: bool = True

    def known_name(self, stored: str) -> str:
        for pattern, replacement in self.renames:
            stored = re.sub(pattern, replacement, stored)
        return stored

    def names_of(self, stored: Iterable[str]) -> dict[str, str]:
        """Map the model's names to names in the files. ValueError if two tensors get the same name."""
        names: dict[str, str] = {}
        for name in stored:
            if self.dropped and re.search(self.dropped, name):
                continue
            known = self.known_name(name)
            if known in names:
                raise ValueError(f"the checkpoint has {known} twice: as {names[known]} and as {name}")
            names[known] = name
        return names


# A layer has one token mixer of either kind.
QWEN3_5 = Architecture("models.decoders.qwen3_5:Qwen35", renames=((r"\.linear_attn\.", ".self_attn."),), head="mtp")
TEXT_ONLY = Architecture(
    "models.decoders.causal_lm:CausalLM",
    renames=((r"^model\.", ""), (r"^(layers|embed_tokens|norm)\.", r"model.language_model.\1.")),  # embedding models lack `model.`
    has_tower=False,
)
EAGLE3 = Architecture(  # a head alone
    "", ("*.safetensors",), renames=((r"^(model\.)?", "eagle3."), (r"^eagle3\.midlayer\.", "eagle3.layers.0.")), dropped=r"^t2d$"
)
QWEN3_VL = Architecture("models.decoders.qwen3_vl:Qwen3VL", renames=((r"^(language_model|visual)\.", r"model.\1."),))

ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "intern_s2_preview": replace(QWEN3_5, dropped=r"^(model\.)?time_series"),  # an encoder of time series
    "llama": TEXT_ONLY,
    "qwen3": TEXT_ONLY,
    "cosmos3_omni": Architecture("models.decoders.qwen3_vl:Qwen3VL", COSMOS3_FILES, COSMOS3_RENAMES, COSMOS3_DROPPED),
}
MIXTURES = ("qwen3_vl_moe", "qwen3_5_moe", "intern_s2_preview")


def imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return vars(import_module(module))[name]


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture. ValueError for an unsupported model type."""
    name = config.get("model_type")
    if (found := ARCHITECTURES.get(str(name))) is None:
        raise ValueError(f"model_type must be one of {', '.join(sorted(ARCHITECTURES))}, got {name!r}")
    return found
