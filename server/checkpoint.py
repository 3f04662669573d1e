"""Contents of a model folder used by the api and the processor."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.config.huggingface import read_config
from models.config.types import ModelConfig, SamplingDefaults


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    model: ModelConfig
    chat_template: str
    special_tokens: dict[str, str]  # by the templates' names, such as `eos_token`
    template_kwargs: dict[str, Any]  # defaults of the template's variables

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"


PLAIN_SAMPLING = SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0)


def read_checkpoint(folder: Path, template_file: str | None = None, is_plain: bool = False, template_kwargs: str = "{}") -> Checkpoint:
    """Read a model folder. `template_file`: file with another chat template; `template_kwargs`: JSON; `is_plain`: ignore
    generation_config.json. ValueError or OSError that names the missing or invalid file or field."""
    model = read_config(folder)
    return Checkpoint(
        folder=folder,
        model=replace(model, sampling=PLAIN_SAMPLING) if is_plain else model,
        chat_template=_chat_template(folder) if template_file is None else Path(template_file).read_text(encoding="utf-8"),
        special_tokens=_special_tokens(folder),
        template_kwargs=json.loads(template_kwargs),
    )


def _chat_template(folder: Path) -> str:
    """Return the chat template, searched in the same order as in transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        template = settings.get("chat_template") if isinstance(settings, dict) else None
        if isinstance(template, str):
            return template
    raise ValueError("the model folder has no chat template")


def _special_tokens(folder: Path) -> dict[str, str]:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    named = {name: settings.get(f"{name}_token") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    texts = {f"{name}_token": token["content"] if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
