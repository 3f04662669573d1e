"""Adapters of `--lora-modules`, read and checked before any process starts."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.wire.adapters import AdapterRef
from engine.wire.config import EngineConfig
from models.config.types import ModelConfig
from models.lora.adapter import read_adapter

NEXT = re.compile(r"[\s,]+(?=[^\s,={\"]+=)|[\s,]+(?=\{)")  # what separates adapters in one text


def named_adapters(config: EngineConfig, model: ModelConfig, served: Sequence[str]) -> tuple[AdapterRef, ...]:
    """Return the adapters of the configuration. ValueError names the one that cannot be served, and why."""
    found: list[AdapterRef] = []
    for name, folder in _listed(config.lora_modules or ""):
        if name in served or any(name == other.name for other in found):
            raise ValueError(f"--lora-modules {name}: the name is already used")
        found.append(checked(name, Path(folder), config, model, f"--lora-modules {name}", len(found) + 1))
    return tuple(found)


def checked(name: str, folder: Path, config: EngineConfig, model: ModelConfig, words: str, number: int) -> AdapterRef:
    """Return the adapter of a folder. ValueError, which begins with `words`, if it cannot be served."""
    try:
        adapter = read_adapter(folder, model, config.max_lora_rank)
    except OSError as problem:
        raise ValueError(f"{words}: a file cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise ValueError(f"{words}: {problem}") from None
    return AdapterRef(number, name, str(folder.absolute()), adapter.has_tower)


def _listed(text: str) -> Iterator[tuple[str, str]]:
    """Read `name=folder` and vLLM's JSON objects; of one JSON object without `path`, names and folders. ValueError."""
    for word in NEXT.split(text.strip()) if text.strip() else ():
        if not word.startswith("{"):
            name, _, folder = word.partition("=")
            if not name or not folder:
                raise ValueError(f"--lora-modules {word}: must be name=folder")
            yield name, folder
            continue
        try:
            value = json.loads(word)
        except ValueError:
            raise ValueError(f"--lora-modules {word}: is not JSON") from None
        pairs = [(value.get("name"), value["path"])] if "path" in value else list(value.items())
        if not all(isinstance(each, str) and each for pair in pairs for each in pair):
            raise ValueError(f"--lora-modules {word}: must have a name and a path")
        yield from pairs
