"""Small random checkpoints of Qwen3.5, made and saved by transformers' own classes. Sizes are odd, and layers come in other orders than
three to one."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

LINEAR, FULL = "linear_attention", "full_attention"
TEXT = {
    "vocab_size": 4096, "hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 40,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 2, 2], "mrope_interleaved": True
    },
    "eos_token_id": 4001,
}  # fmt: skip
VISION = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 100, "out_hidden_size": 72}
IDS = {"image_token_id": 4012, "video_token_id": 4013, "vision_start_token_id": 4009, "vision_end_token_id": 4010}
DENSE = {**TEXT, "intermediate_size": 136, "layer_types": [LINEAR, FULL, LINEAR, LINEAR, FULL, LINEAR], "num_hidden_layers": 6}
MOE = {
    **TEXT, "layer_types": [FULL, LINEAR, LINEAR, FULL], "num_hidden_layers": 4,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40,
}  # fmt: skip


def write(folder: Path, is_sparse: bool = False, is_tied: bool = False, ids: Mapping[str, int] = IDS, **text: object) -> PreTrainedModel:
    rest = {"vision_config": VISION, "tie_word_embeddings": is_tied, **ids}
    model: PreTrainedModel
    if is_sparse:
        model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config={**MOE, **text}, **rest)).eval()
    else:
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config={**DENSE, **text}, **rest)).eval()
    randomize_(model)
    model.generation_config.eos_token_id = [4002, 4001]
    model.save_pretrained(folder)
    return model


def add_head(folder: Path, model: PreTrainedModel) -> nn.ModuleDict:
    """The published names of a head that predicts further tokens, beside a saved model. Returns it, of transformers' layers."""
    text = model.model.language_model
    whole, norm, width = next(layer for layer in text.layers if hasattr(layer, "self_attn")), type(text.norm), text.config.hidden_size
    head = nn.ModuleDict(
        {"fc": nn.Linear(2 * width, width, bias=False), "layers": nn.ModuleList([copy.deepcopy(whole)])}
        | {name: norm(width, eps=text.config.rms_norm_eps) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    ).eval()
    randomize_(head)
    save_file({f"mtp.{name}": tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / "model-mtp.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return head


@torch.no_grad()
def randomize_(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        if name.endswith("A_log"):
            parameter.mul_(0.8).sub_(2)
        elif name.endswith("linear_attn.norm.weight") or (name.endswith("norm.weight") and "visual" in name):
            parameter.mul_(0.1).add_(1)
        elif parameter.dim() == 1:
            parameter.mul_(0.2)
        elif not name.endswith(("embed_tokens.weight", "pos_embed.weight")):
            parameter.mul_(torch.Size(parameter.shape[-1:] if "experts" in name else parameter.shape[1:]).numel() ** -0.5)
