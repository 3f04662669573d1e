"""Writes the weights of a trained demo model as bf16 safetensors under the names of the published checkpoints. Used by `train`."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

PREFIX = "model."  # of the model within the trainee


def export(model: nn.Module, average: dict[str, Tensor], folder: Path) -> None:
    """Save the averaged weights; `average` is named as in the trainee, its auxiliary heads are dropped, tied embeddings stand once."""
    weights: dict[str, Tensor] = {}
    known = model.state_dict()
    for name, value in average.items():
        own = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and own in known and own != "lm_head.weight":
            weights[own] = value.detach().to("cpu", torch.bfloat16).contiguous()
    missing = set(known) - set(weights) - {"lm_head.weight"}
    assert not missing, f"not trained: {sorted(missing)}"
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
