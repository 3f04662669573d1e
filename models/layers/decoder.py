"""What decoders are made of: attention over the paged cache, SwiGLU, and the layer of both."""

from dataclasses import dataclass

import torch
from torch import nn

from models.attention.paged import AttentionBackend, FusedAttention
from models.backends.ops import NewHeads, Normed, Ops, Residual
from models.config import TextConfig
from models.layers.linear import FusedColumnParallelLinear, Part, RowParallelLinear, even_part, quantize_
from models.layers.moe import SparseMoe
from models.layers.norm import RMSNorm
from models.parallel import TensorParallel, kv_heads_of


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What all layers of a step share."""

    attention: AttentionBackend
    fused: FusedAttention | None  # the same, if it also makes and stores heads
    cos_sin_TK: torch.Tensor  # rotary rows of the tokens
    slots_T: torch.Tensor  # KV slots of the tokens
    real_T: torch.Tensor | None  # which are not padding, for layers of experts; None: all


class SelfAttention(nn.Module):
    """Projections around the paged attention; this rank's heads."""

    def __init__(self, layer: int, config: TextConfig, tp: TensorParallel, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        self.ops = ops
        head_dim, total_kv = config.head_dim, config.num_kv_heads * config.head_dim
        first_kv, num_kv = kv_heads_of(config.num_kv_heads, tp)
        parts = (
            even_part("q_proj", config.num_heads * head_dim, tp),
            Part("k_proj", total_kv, first_kv * head_dim, num_kv * head_dim),
            Part("v_proj", total_kv, first_kv * head_dim, num_kv * head_dim),
        )
        stored = None if config.is_fp8 else dtype
        self.qkv_proj = FusedColumnParallelLinear(config.hidden_size, parts, stored, device)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype, device)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype, device)
        self.o_proj = RowParallelLinear(config.num_heads * head_dim, config.hidden_size, tp, ops, stored, device)

    def new_heads(self, x_TD: Normed, context: LayerContext) -> NewHeads:
        norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        return NewHeads(self.ops.linear(x_TD, self.qkv_proj.weight), *norms, context.cos_sin_TK, context.slots_T)

    def store(self, heads: NewHeads, context: LayerContext) -> torch.Tensor:
        """Writes the tokens' keys and values into the cache and returns their queries (T, H, K), normalised and rotated."""
        return self.ops.norm_rope_store_(heads, context.attention.pool(self.layer))

    def forward(self, x_TD: Normed, context: LayerContext) -> torch.Tensor:
        """(T, H * K): what `o_proj` takes."""
        heads = self.new_heads(x_TD, context)
        if context.fused is not None:
            return context.fused.run_fused(self.layer, heads).flatten(1)
        return context.attention.run(self.layer, self.store(heads, context)).flatten(1)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TextConfig, tp: TensorParallel, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = ops
        parts = [even_part(name, config.intermediate_size, tp) for name in ("gate_proj", "up_proj")]
        stored = None if config.is_fp8 else dtype
        self.gate_up_proj = FusedColumnParallelLinear(config.hidden_size, parts, stored, device)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, tp, ops, stored, device)

    def add_(self, residual: Residual, x_TD: Normed, real_T: torch.Tensor | None) -> None:
        """residual += the output."""
        self.down_proj.add_(residual, self.ops.swiglu(x_TD, self.gate_up_proj.weight))

    def quantize_(self) -> None:
        quantize_(self.gate_up_proj)
        quantize_(self.down_proj)


FeedForward = type[MLP] | type[SparseMoe]  # made from (config, tp, ops, dtype, device)


class DecoderLayer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(
        self,
        layer: int,
        config: TextConfig,
        tp: TensorParallel,
        ops: Ops,
        feed_forward: FeedForward,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.self_attn = SelfAttention(layer, config, tp, ops, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp = feed_forward(config, tp, ops, dtype, device)

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
        """Makes the layer's matrices float8."""
        quantize_(self.self_attn.qkv_proj)
        quantize_(self.self_attn.o_proj)
        self.mlp.quantize_()
