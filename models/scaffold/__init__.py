"""Generator of complete model folders without a download: published shapes with dummy weights (`--load-format dummy`), and tiny models."""

import json
from pathlib import Path

from models.config.formats import Format
from models.scaffold.configs import config_files
from models.scaffold.shapes import SHAPES, Shape
from models.scaffold.tokenizer import tokenizer_config_json, tokenizer_json

__all__ = ["SHAPES", "Shape", "write_model_folder"]


def write_model_folder(out: Path, shape: Shape, weights: str, seed: int, format: Format = "plain") -> None:
    """Write every file of a checkpoint of this shape, loadable by this engine and by transformers; existing files are replaced.

    `weights` is "none" (the folder then needs `--load-format dummy`; torch is not imported) or "random": seeded normal values as
    safetensors under Hugging Face names, in shards when big. `format` is the format of the decoder's matrices.
    """
    if weights not in ("none", "random"):
        raise ValueError(f"weights must be 'none' or 'random', got {weights!r}")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = json.dumps(tokenizer_json(shape.num_base_tokens), ensure_ascii=False, separators=(",", ":"))
    (out / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    files = config_files(shape, format)
    files["tokenizer_config.json"] = tokenizer_config_json(shape.num_base_tokens, thinks=shape.delta is not None)
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if weights == "random":
        from models.scaffold.weights import write_random_weights  # torch is imported only when weights are made

        write_random_weights(out, seed)
