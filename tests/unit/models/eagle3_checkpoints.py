"""Random EAGLE-3 heads in the published layouts, computed by plain torch: vLLM's and SGLang's `llama_eagle3.py` as formulas."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

TAPS = 1, 3, 4
DRAFT_SIZE = 90


class Eagle3(nn.Module):
    """A head for a model of this configuration. `is_nested`: the layout of speculators, with the whole vocabulary, the model's embedding,
    norms of heads, the residual stream after the norm, and positions on one axis."""

    def __init__(self, text: PretrainedConfig, is_nested: bool) -> None:
        super().__init__()
        self.text, self.is_nested = text, is_nested
        width, size, eps = text.hidden_size, text.head_dim, text.rms_norm_eps
        shapes = {"q_proj": text.num_attention_heads, "k_proj": text.num_key_value_heads, "v_proj": text.num_key_value_heads}
        attention: dict[str, nn.Module] = {name: nn.Linear(2 * width, heads * size, bias=False) for name, heads in shapes.items()}
        attention["o_proj"] = nn.Linear(text.num_attention_heads * size, width, bias=False)
        if is_nested:
            attention |= {name: nn.RMSNorm(size, eps) for name in ("q_norm", "k_norm")}
        mlp = {name: nn.Linear(width, 100, bias=False) for name in ("gate_proj", "up_proj")}
        mlp["down_proj"] = nn.Linear(100, width, bias=False)
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        layer = {name: nn.RMSNorm(width, eps) for name in norms} | {"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)}
        self.fc, self.layer, self.norm = nn.Linear(3 * width, width, bias=False), nn.ModuleDict(layer), nn.RMSNorm(width, eps)
        self.size = text.vocab_size if is_nested else DRAFT_SIZE
        self.lm_head = nn.Linear(width, self.size, bias=False)
        self.embed_tokens = nn.Embedding(text.vocab_size, width)
        generator = torch.Generator().manual_seed(7)
        for name, parameter in self.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data = 1 + 0.2 * values if parameter.dim() == 1 else values * (1 if "embed" in name else parameter.shape[-1] ** -0.5)
        chosen = torch.randperm(text.vocab_size, generator=generator)[: self.size].sort().values
        self.ids = torch.arange(self.size) if is_nested else chosen

    def save(self, folder: Path) -> None:
        folder.mkdir()
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        layer = {"num_hidden_layers": 1, "intermediate_size": 100, "rms_norm_eps": self.text.rms_norm_eps, "rope_theta": 5e6}
        config: dict[str, object]
        if self.is_nested:
            tensors = {name.replace("layer.", "layers.0.", 1): tensor for name, tensor in tensors.items() if "embed" not in name}
            config = {"transformer_layer_config": layer | {"model_type": "qwen3"}, "draft_vocab_size": self.size}
            config |= {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": TAPS}
        else:
            tensors = {name.replace("layer.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
            tensors |= {"d2t": self.ids - torch.arange(self.size), "t2d": torch.zeros(self.text.vocab_size, dtype=torch.bool)}
            config = layer | {"draft_vocab_size": self.size, "vocab_size": self.text.vocab_size}
            config["rope_scaling"] = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))

    def forward(self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        layer, size = self.layer, self.text.head_dim
        normed = layer["hidden_norm"](hidden_TD)
        x = torch.cat((layer["input_layernorm"](embedded_TD), normed), dim=-1)
        residual = normed if self.is_nested else hidden_TD
        q, k, v = (layer["self_attn"][name](x).view(1, len(x), -1, size) for name in ("q_proj", "k_proj", "v_proj"))
        if self.is_nested:
            q, k = layer["self_attn"]["q_norm"](q), layer["self_attn"]["k_norm"](k)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *cos_sin)
        attended = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        residual = residual + layer["self_attn"]["o_proj"](attended.transpose(1, 2).flatten(2)[0])
        y, mlp = layer["post_attention_layernorm"](residual), layer["mlp"]
        return residual + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
