"""What the api and the processor need to know of a model folder: token ids, geometry, sampling defaults, chat template. Plain JSON files.

`models.config` is the engine's reader of the same files; `server` may not import it, and a test holds the two together.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.geometry import VisionGeometry

# Of the published checkpoints, for folders without preprocessor_config.json.
DEFAULT_MIN_PIXELS = 65_536
DEFAULT_MAX_PIXELS = 16_777_216


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the checkpoint recommends where a request is silent (generation_config.json)."""

    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The settings of a model folder."""

    folder: Path
    geometry: VisionGeometry
    sampling: SamplingDefaults
    image_token_id: int
    num_values_per_image_token: int  # main embedding and DeepStack levels
    chat_template: str

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads the folder. ValueError or OSError says which file is missing or wrong."""
    config = _read_json(folder / "config.json")
    vision = config["vision_config"]
    return Checkpoint(
        folder=folder,
        geometry=_geometry(vision, _read_optional(folder / "preprocessor_config.json")),
        sampling=_sampling(_read_optional(folder / "generation_config.json")),
        image_token_id=config["image_token_id"],
        num_values_per_image_token=(1 + len(vision["deepstack_visual_indexes"])) * vision["out_hidden_size"],
        chat_template=_chat_template(folder),
    )


def _geometry(vision: dict[str, Any], preprocessor: dict[str, Any]) -> VisionGeometry:
    size = preprocessor.get("size") or {}
    return VisionGeometry(
        patch_size=vision["patch_size"],
        merge_size=vision["spatial_merge_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        min_pixels=int(preprocessor.get("min_pixels") or size.get("shortest_edge") or DEFAULT_MIN_PIXELS),
        max_pixels=int(preprocessor.get("max_pixels") or size.get("longest_edge") or DEFAULT_MAX_PIXELS),
    )


def _sampling(generation: dict[str, Any]) -> SamplingDefaults:
    greedy = generation.get("do_sample") is False
    return SamplingDefaults(
        temperature=0.0 if greedy else float(generation.get("temperature", 1.0)),
        top_p=float(generation.get("top_p", 1.0)),
        top_k=int(generation.get("top_k", 0)),
    )


def _chat_template(folder: Path) -> str:
    """From chat_template.jinja, chat_template.json or tokenizer_config.json: the order in which transformers looks."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _read_optional(folder / name).get("chat_template")
        if isinstance(template, str):
            return template
    raise ValueError("the model folder has no chat template")


def _read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must hold a JSON object")
    return value


def _read_optional(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}
