"""Loading of a model's parameters from safetensors, where each rank reads only its slices, or with dummy values."""

import json
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from models.checkpoint.names import CheckpointPart, CheckpointTensor, Stored
from models.config.registry import EAGLE3, Architecture
from models.decoders.contract import LanguageModel
from models.layers.decoder import SelfAttention
from models.layers.linear import FusedColumnParallelLinear, placed
from models.weights.matrix import matrices_of

logger = logging.getLogger(__name__)

OUTPUT_MATRIX = "lm_head.weight"
INDEX = ".index.json"
CACHE_SCALE = re.compile(r"layers\.(\d+)\.self_attn\.(?:[kv]_proj\.)?([kv])_scale$")
RESIDUAL = re.compile(r"\.(o_proj|out_proj|down_proj|experts\.down)(\.weight)?$")  # matrices that write to the residual stream

Progress = Callable[[int, int], None]  # (bytes loaded so far, bytes in all)


def load_weights(model: LanguageModel, folder: Path, progress: Progress) -> None:
    """Load the folder's safetensors. ValueError that names tensors which are missing, unexpected or of another shape."""
    with opened(folder, model.config.architecture) as tensors:
        fill(model, tensors, progress)


@contextmanager
def opened(folder: Path, architecture: Architecture) -> Iterator[dict[str, Stored]]:
    """Yield the folder's tensors by the model's names."""
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in weight_files(folder, architecture)]
        file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict
        names = architecture.names_of(file_of)
        yield {known: file_of[name].get_slice(name) for known, name in names.items()}


def fill(model: LanguageModel, source: Mapping[str, Stored], progress: Progress) -> None:
    """Load tensors under the model's names, converted to its dtype; errors as in `load_weights`."""
    if OUTPUT_MATRIX not in source and not model.config.tie_word_embeddings:
        logger.warning("the checkpoint has no %s (an embedding model?): logits are computed from the input embeddings", OUTPUT_MATRIX)
        model.tie_embeddings()
    _fill(model.checkpoint_tensors(), source, progress)


def load_eagle3(model: LanguageModel, folder: Path, progress: Progress) -> None:
    """Load the EAGLE-3 head of the folder. ValueError as of `load_weights`."""
    with opened(folder, EAGLE3) as tensors:
        _fill(model.head_tensors(tensors.keys()), tensors, progress)


def load_cache_scales(model: LanguageModel, folder: Path) -> None:
    """Set the scales of keys and values in float8 where the checkpoint has some; with another cache only log that there are some.
    ValueError for one that is not a positive number."""
    modules = {path: module for path, module in model.named_modules() if isinstance(module, SelfAttention)}
    with opened(folder, replace(model.config.architecture, dropped=r"(?<!\.[kv]_scale)$")) as tensors:
        found = {name: match for name in tensors if (match := CACHE_SCALE.search(name)) is not None}
        if found and not model.config.text.has_float8_cache:
            logger.info("the checkpoint has scales for a KV cache in float8: --kv-cache-dtype fp8 uses them")
            return
        for name, match in found.items():
            stored = tensors[name]
            scale = float(stored[(slice(None),) * len(stored.get_shape())])
            if not 0 < scale < math.inf:
                raise ValueError(f"tensor {name} must be a positive number, got {scale}")
            module = modules[f"language_model.layers.{match[1]}.self_attn"]
            keys, values = module.cache_scales
            module.cache_scales = (scale, values) if match[2] == "k" else (keys, scale)


def _fill(parts: Iterable[CheckpointPart], source: Mapping[str, Stored], progress: Progress) -> None:
    slots = [slot for part in parts for slot in present(part, source)]
    expected = {slot.name: slot.shape for slot in slots}
    found = {name for name in source if not CACHE_SCALE.search(name)} - ({OUTPUT_MATRIX} - expected.keys())
    demand_none("misses", expected.keys() - found)
    demand_none("has unexpected", found - expected.keys())
    total, done = sum(slot.target.nbytes for slot in slots), 0
    for slot in slots:
        if (shape := tuple(source[slot.name].get_shape())) != slot.shape:
            raise ValueError(f"tensor {slot.name} has shape {shape}, the configuration requires {slot.shape}")
        slot.read(source[slot.name])
        done += slot.target.nbytes
        progress(done, total)


def present(part: CheckpointPart, source: Mapping[str, Stored]) -> tuple[CheckpointTensor, ...]:
    """Return the tensors of a part; of several layouts the only complete one, or else the one with the most tensors."""
    if isinstance(part, CheckpointTensor):
        return (part,)

    def num_found(layout: tuple[CheckpointTensor, ...]) -> int:
        return sum(slot.name in source and tuple(source[slot.name].get_shape()) == slot.shape for slot in layout)

    whole = [layout for layout in part.layouts if num_found(layout) == len(layout)]
    if len(whole) > 1:
        raise ValueError(f"tensor {whole[0][0].name} can be read in more than one way: the checkpoint has several layouts")
    return max(part.layouts, key=num_found)


def init_dummy_weights(model: LanguageModel, seed: int) -> None:
    """Fill with random values: matrices with standard deviation fan_in ** -0.5, norms one, biases zero. Replicated values are equal.

    Untied embeddings have standard deviation 1, and matrices that write to the decoder's residual stream (2 * layers) ** -0.5 of theirs:
    hidden states remain those of their tokens, so that routers choose almost uniformly.
    """

    def seeded(name: str, rank: int) -> torch.Generator:
        return torch.Generator(model.device).manual_seed(zlib.crc32(f"{seed}/{rank}/{name}".encode()))

    fused = {name: module for name, module in model.named_modules() if isinstance(module, FusedColumnParallelLinear)}
    whole = {f"{name}.weight" for name, module in fused.items() if all(part.rows == part.total_rows for part in module.parts)}

    def rank_of(name: str) -> int:
        return 0 if name in whole or name.startswith("visual.") or name.endswith("gate.weight") else model.tp.rank

    def deviation(name: str, fan_in: int) -> float:
        if name.endswith("embed_tokens.weight") and not model.config.tie_word_embeddings:
            return 1.0
        return fan_in**-0.5 * ((2 * model.config.text.num_layers) ** -0.5 if RESIDUAL.search(name) else 1.0)

    for name, matrix in matrices_of(model):
        matrix.storage.fill_normal_(deviation(name, matrix.shape[1]), seeded(name, rank_of(name)))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=deviation(name, parameter.shape[-1]), generator=seeded(name, rank_of(name)))
        else:
            parameter.data.fill_(0.0 if name.endswith(".bias") else 1.0)
    if model.tp.size > model.config.text.num_kv_heads:
        for name, module in fused.items():
            for part, own in placed(module.parts):
                if part.name in ("k_proj", "v_proj"):  # heads replicated on several ranks
                    rows = module.weight.storage.rows(own.start, own.stop)
                    rows.fill_normal_(rows.shape[1] ** -0.5, seeded(f"{name}/{part.name}/{part.start}", 0))


def weight_files(folder: Path, architecture: Architecture) -> list[Path]:
    """Return the weight files. ValueError if there are none, or if several indexes name different ones."""
    files: set[Path] = set()
    for pattern in architecture.weight_files:
        parent = (folder / pattern).parent
        indexes = _files(folder, pattern + INDEX) or _files(parent, "*.safetensors" + INDEX)
        found = [{parent / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()} for index in indexes]
        whole = [each for each in found if all(file.is_file() for file in each)] or found[:1]
        if any(each != whole[0] for each in whole):
            raise ValueError(f"{parent} contains several weight indexes: {', '.join(index.name for index in indexes)}; keep one")
        files.update(whole[0] if whole else _files(folder, pattern))
    if not files:
        raise ValueError(f"{folder} contains no safetensors weights (dummy weights need no files: --load-format dummy)")
    return sorted(files)


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the regular files: opening a pipe would wait for ever."""
    return [path for path in sorted(folder.glob(pattern)) if path.is_file()]


def demand_none(verb: str, names: Set[str]) -> None:
    """Raise ValueError that names these tensors, if there are any."""
    if names:
        shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ValueError(f"the checkpoint {verb} tensor{'s' if len(names) > 1 else ''} {shown}")
