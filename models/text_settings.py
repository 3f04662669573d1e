"""Of a decoder's config.json: rotary parameters of either layout, and what a text model leaves out. Imports no torch."""

from collections.abc import Mapping
from typing import Any

LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
NO_TOWER = {  # what the config.json of a text model lacks: a tower of no blocks and no width, and no token for its embeddings
    "vision_config": {
        "depth": 0, "hidden_size": 0, "num_heads": 1, "intermediate_size": 0, "in_channels": 0, "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 0, "num_position_embeddings": 0,
    },
    **dict.fromkeys(("image_token_id", "vision_start_token_id", "vision_end_token_id"), -1),
}  # fmt: skip


def with_no_tower(config: Mapping[str, Any]) -> dict[str, Any]:
    """A text model's settings where others have them, with what it may leave out."""
    heads = config["num_attention_heads"]
    text = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads, "rope_theta": 10_000.0}
    text |= {name: value for name, value in config.items() if value is not None}
    text["mrope_section"] = text["head_dim"] // 2, 0, 0  # one axis
    return {**NO_TOWER, **text, "text_config": text}


def rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters, with `rope_theta` and `llama3` (empty: not so scaled) always inside. ValueError for other scalings."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 5_000_000.0))
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"rope_type must be 'default' or 'llama3', got {rope_type!r}")
    if rope_type == "llama3" and not rope.keys() >= set(LLAMA3):
        raise ValueError(f"rope_type 'llama3' must come with {', '.join(LLAMA3)}")
    rope["llama3"] = tuple(float(rope[name]) for name in LLAMA3) if rope_type == "llama3" else ()
    return rope
