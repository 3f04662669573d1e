"""What decoders are made of: attention over the paged cache, SwiGLU, and the layer of both."""

from dataclasses import dataclass

import torch
from torch import nn

from models.attention.paged import AttentionBackend, FusedAttention
from models.backends.ops import NewHeads, Normed, Residual
from models.config import TextConfig
from models.layers.linear import FusedColumnParallelLinear, Part, RowParallelLinear, Setup, even_part, quantize_
from models.layers.moe import SparseMoe
from models.parallel import kv_heads_of


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What all layers of a step share."""

    attention: AttentionBackend
    fused: FusedAttention | None  # the same, if it also makes and stores heads
    cos_sin_TK: torch.Tensor  # rotary rows of the tokens
    slots_T: torch.Tensor  # KV slots of the tokens
    real_T: torch.Tensor | None  # which are not padding, for layers of experts; None: all


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension; whole on every rank."""

    def __init__(self, size: int, eps: float, setup: Setup) -> None:
        super().__init__()
        self.eps = eps
        self.weight = setup.parameter(size)

    def forward(self, residual: Residual) -> Normed:
        """The normalised stream, for the products of one layer."""
        return Normed(residual, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Projections around the paged attention; this rank's heads."""

    def __init__(self, layer: int, config: TextConfig, setup: Setup) -> None:
        super().__init__()
        self.layer = layer
        self.ops = setup.ops
        width, head_dim = config.num_heads * config.head_dim, config.head_dim
        first_kv, num_kv = kv_heads_of(config.num_kv_heads, setup.tp)
        kv_rows = config.num_kv_heads * head_dim, first_kv * head_dim, num_kv * head_dim
        parts = even_part("q_proj", width, setup.tp), Part("k_proj", *kv_rows), Part("v_proj", *kv_rows)
        self.qkv_proj = FusedColumnParallelLinear(config.hidden_size, parts, config.is_fp8, setup)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, setup)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, setup)
        self.o_proj = RowParallelLinear(width, config.hidden_size, config.is_fp8, setup)

    def new_heads(self, x_TD: Normed, context: LayerContext) -> NewHeads:
        norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        return NewHeads(self.ops.linear(x_TD, self.qkv_proj.weight), *norms, context.cos_sin_TK, context.slots_T)

    def store(self, heads: NewHeads, context: LayerContext) -> torch.Tensor:
        """Writes the tokens' keys and values into the cache. Returns their queries (T, H, K), normalised and rotated."""
        return self.ops.norm_rope_store_(heads, context.attention.pool(self.layer))

    def forward(self, x_TD: Normed, context: LayerContext) -> torch.Tensor:
        """(T, H * K): what `o_proj` takes."""
        heads = self.new_heads(x_TD, context)
        if context.fused is not None:
            return context.fused.run_fused(self.layer, heads).flatten(1)
        return context.attention.run(self.layer, self.store(heads, context)).flatten(1)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TextConfig, setup: Setup) -> None:
        super().__init__()
        self.ops = setup.ops
        parts = [even_part(name, config.intermediate_size, setup.tp) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = FusedColumnParallelLinear(config.hidden_size, parts, config.is_fp8, setup)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, config.is_fp8, setup)

    def add_(self, residual: Residual, x_TD: Normed, real_T: torch.Tensor | None) -> None:
        """residual += the output."""
        self.down_proj.add_(residual, self.ops.swiglu(x_TD, self.gate_up_proj.weight))

    def quantize_(self) -> None:
        quantize_(self.gate_up_proj)
        quantize_(self.down_proj)


class DecoderLayer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, layer: int, config: TextConfig, setup: Setup) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, setup)
        self.self_attn = SelfAttention(layer, config, setup)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, setup)
        moe = config.moe
        self.mlp = MLP(config, setup) if moe is None else SparseMoe(config.hidden_size, moe, config.is_fp8, setup)

    def forward(self, residual: Residual, context: LayerContext, wanted_S: torch.Tensor | None = None) -> None:
        """residual += attention, then residual += MLP. With `wanted_S`, only these tokens go on after their keys are stored."""
        attended_TX, real_T = self.self_attn(self.input_layernorm(residual), context), context.real_T
        if wanted_S is not None:
            real_T = None if real_T is None else real_T[wanted_S]
            attended_TX = attended_TX[wanted_S]
            residual.keep_(wanted_S)
        self.self_attn.o_proj.add_(residual, attended_TX)
        self.mlp.add_(residual, self.post_attention_layernorm(residual), real_T)

    def store(self, residual: Residual, context: LayerContext) -> None:
        """The keys and values alone: of a last layer whose output nobody wants."""
        self.self_attn.store(self.self_attn.new_heads(self.input_layernorm(residual), context), context)

    def quantize_(self) -> None:
        quantize_(self.self_attn.qkv_proj)
        quantize_(self.self_attn.o_proj)
        self.mlp.quantize_()
