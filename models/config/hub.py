"""Resolution of `--model` to a folder on disk. Imports no torch; the hub is contacted only for a model that is not a folder."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.config.registry import EAGLE3, architecture_of
from models.demo import CHECKPOINT
from models.scaffold import SHAPES, write_model_folder

LoadFormat = Literal["auto", "dummy"]

SIZES = ("2B", "4B", "8B", "32B", "30B-A3B", "235B-A22B")  # of Qwen3-VL
DEMO = "demo"
CONFIG_PATTERNS = ("*.json", "*.jinja", "*.txt")
INDEX_PATTERNS = ("*.safetensors.index.json",)
QWEN = re.compile(rf"(Qwen3-VL-(?:{'|'.join(SIZES)}))(-Instruct|-Thinking)?(-FP8)?")
HYBRID = re.compile(r"Qwen3\.[568]-([\d.]+B(?:-A\d+B)?)(?:-FP8)?")  # Qwen3.5 and later
COSMOS = re.compile("Cosmos-Reason2-(2B|8B)|Cosmos3-(Nano|Super)(-Reasoner)?")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    folder: Path  # config and tokenizer, and weights unless they are dummies
    name: str  # in the API


def resolve(model: str, load_format: LoadFormat, cache_dir: Path) -> ResolvedModel:
    """Return the demo, a given folder, or one downloaded into the hub's cache. The files of a published size with dummy weights are written
    below `cache_dir` without a network. ValueError otherwise and if the download fails."""
    if model == DEMO:
        return ResolvedModel(CHECKPOINT, model)
    path = Path(model).expanduser()
    if path.is_dir():
        return ResolvedModel(path, path.resolve().name)
    hub_id = hub_id_of(model)
    shape_name = _published_size(hub_id)
    if load_format == "dummy" and shape_name is not None:
        folder = cache_dir / "scaffold" / hub_id.replace("/", "--")
        write_model_folder(folder, SHAPES[shape_name], weights="none", seed=0, format="float8" if hub_id.endswith("-FP8") else "plain")
        return ResolvedModel(folder, model)
    folder = _download(hub_id, CONFIG_PATTERNS)
    if load_format != "dummy":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        folder = _download(hub_id, CONFIG_PATTERNS + architecture_of(config).weight_files + INDEX_PATTERNS)
    return ResolvedModel(folder, model)


def resolve_eagle3(model: str | None, cache_dir: Path) -> Path:
    """Return the folder of an EAGLE-3 head; without a name one whose sizes follow from the model, for dummy weights. ValueError as of
    `resolve`."""
    if model is None:
        folder = cache_dir / "eagle3"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}", encoding="utf-8")
        return folder
    if (path := Path(model).expanduser()).is_dir():
        return path
    return _download(model, (*EAGLE3.weight_files, *INDEX_PATTERNS, "config.json"))


def hub_id_of(model: str) -> str:
    """Return the hub id of an alias: `Qwen3-VL-8B` is the Instruct checkpoint."""
    if qwen := QWEN.fullmatch(model):
        return f"Qwen/{qwen[1]}{qwen[2] or '-Instruct'}{qwen[3] or ''}"
    if HYBRID.fullmatch(model):
        return f"Qwen/{model}"
    return f"nvidia/{model.removesuffix('-Reasoner')}" if COSMOS.fullmatch(model) else model


def _published_size(hub_id: str) -> str | None:
    """Return the key of SHAPES, if there is one."""
    if (hybrid := re.fullmatch(f"Qwen/{HYBRID.pattern}", hub_id)) and (name := f"3.5-{hybrid[1]}") in SHAPES:
        return name
    return next((size for size in SIZES if hub_id.startswith((f"Qwen/Qwen3-VL-{size}-", f"nvidia/Cosmos-Reason2-{size}"))), None)


def _download(hub_id: str, patterns: tuple[str, ...]) -> Path:
    if hub_id.count("/") != 1 or hub_id.startswith((".", "/")):
        raise ValueError(f"{hub_id!r} is neither a folder, nor a hub id, nor an alias such as Qwen3-VL-8B")
    import httpx  # these take a second, which a model in a folder does not need
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (httpx.HTTPError, LocalEntryNotFoundError) as error:
        raise ValueError(f"{hub_id} could not be fetched from the hub: {error}") from error
