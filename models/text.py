"""The decoder of Qwen3-VL: embedding, layers with paged attention, DeepStack, output head. Built and called by `models.qwen3_vl`."""

import torch
from torch import nn

from models.attention.paged import AttentionBackend
from models.backends.ops import KVPool, Ops
from models.batch import ForwardBatch
from models.config import ModelConfig, TextConfig
from models.layers.fp8 import Input
from models.layers.norm import RMSNorm
from models.layers.parallel import (
    FusedColumnParallelLinear,
    Part,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    even_part,
    kv_heads_of,
    quantize_,
)
from models.layers.rotary import MRope
from models.vision.splice import add_deepstack_, splice_


class Residual:
    """The residual stream: `sum_TD`, added to in place, and addends that it may lack until the next norm adds them in passing."""

    def __init__(self, sum_TD: torch.Tensor) -> None:
        self.sum_TD = sum_TD
        self._addends_STD: torch.Tensor | None = None

    def add_(self, layer: RowParallelLinear, x_TX: Input) -> None:
        """Adds the layer's output. The addends of the one before have been taken."""
        assert self._addends_STD is None
        self._addends_STD = layer.add_(x_TX, self.sum_TD)

    def take_addends(self) -> torch.Tensor | None:
        """(S, T, D) or None; whoever takes them adds them to `sum_TD`."""
        addends_STD, self._addends_STD = self._addends_STD, None
        return addends_STD


class SelfAttention(nn.Module):
    """Projections around the paged attention; this rank's heads."""

    def __init__(self, config: TextConfig, tp: TensorParallel, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
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
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, ops, dtype, device)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, ops, dtype, device)
        self.o_proj = RowParallelLinear(config.num_heads * head_dim, config.hidden_size, tp, ops, stored, device)

    def store_and_query(
        self, residual: Residual, norm: RMSNorm, cos_sin_TK: torch.Tensor, pool: KVPool, slots_T: torch.Tensor
    ) -> torch.Tensor:
        """Writes the tokens' keys and values into the pool and returns their queries (T, H, K), normalised and rotated."""
        qkv_TX = self.ops.norm_linear(residual.sum_TD, norm.weight, norm.eps, self.qkv_proj.weight, residual.take_addends())
        eps = self.q_norm.eps
        return self.ops.norm_rope_store_(qkv_TX, self.q_norm.weight, self.k_norm.weight, eps, cos_sin_TK, pool, slots_T)


class MLP(nn.Module):
    """SwiGLU of the normalised residual, which it joins: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TextConfig, tp: TensorParallel, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = ops
        parts = [even_part(name, config.intermediate_size, tp) for name in ("gate_proj", "up_proj")]
        stored = None if config.is_fp8 else dtype
        self.gate_up_proj = FusedColumnParallelLinear(config.hidden_size, parts, stored, device)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, tp, ops, stored, device)

    def add_(self, residual: Residual, norm: RMSNorm) -> None:
        """residual += MLP(norm(residual))."""
        inner = self.ops.norm_swiglu(residual.sum_TD, norm.weight, norm.eps, self.gate_up_proj.weight, residual.take_addends())
        residual.add_(self.down_proj, inner)


class DecoderLayer(nn.Module):
    """The parts of one layer; `TextModel.forward` runs them, since the residual stream runs across layers."""

    def __init__(self, config: TextConfig, tp: TensorParallel, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, dtype, device)
        self.self_attn = SelfAttention(config, tp, ops, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, dtype, device)
        self.mlp = MLP(config, tp, ops, dtype, device)


class TextModel(nn.Module):
    """Token ids and image embeddings in, final hidden states of the wanted tokens out."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        text = config.text
        self.num_deepstack_levels = len(config.vision.deepstack_indexes)
        assert text.num_layers > self.num_deepstack_levels, "DeepStack follows a layer whose tokens are all computed"
        self.rope = MRope(text, device)
        self.embed_tokens = VocabParallelEmbedding(text.vocab_size, text.hidden_size, tp, dtype, device)
        self._layers = [DecoderLayer(text, tp, ops, dtype, device) for _ in range(text.num_layers)]
        self.layers = nn.ModuleList(self._layers)  # under the checkpoint's name; the list beside it keeps the type
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, ops, dtype, device)

    def quantize_(self) -> None:
        """Makes the layers' matrices float8, as the published FP8 checkpoints are. Embeddings and head stay as they are."""
        for layer in self._layers:
            for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
                quantize_(linear)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """(S, D): normalised hidden states of `batch.logits_indices`; the keys and values of all tokens are in the pool afterwards.

        `attention` has been planned for this batch. After the last layer's keys are stored, only the wanted tokens go on.
        """
        residual = Residual(self.embed_tokens(batch.input_ids_T))
        splice_(residual.sum_TD, batch.visual)
        cos_sin_TK = self.rope.rows(batch.positions_3T)
        slots_T, wanted_S = batch.attention.slot_mapping_T, batch.logits_indices
        for i, layer in enumerate(self._layers):
            q_THK = layer.self_attn.store_and_query(residual, layer.input_layernorm, cos_sin_TK, attention.pool(i), slots_T)
            if i == len(self._layers) - 1 and len(wanted_S) == 0:
                return residual.sum_TD[:0]
            out_TX = attention.run(i, q_THK).flatten(1)
            if i == len(self._layers) - 1 and len(wanted_S) < len(out_TX):
                out_TX, residual = out_TX[wanted_S], Residual(residual.sum_TD[wanted_S])  # which lacks nothing since its norm
            residual.add_(layer.self_attn.o_proj, out_TX)
            layer.mlp.add_(residual, layer.post_attention_layernorm)
            if i < self.num_deepstack_levels:
                add_deepstack_(residual.sum_TD, batch.visual, level=i)  # whatever else the sum lacks
        hidden_SD: torch.Tensor = self.norm(residual.sum_TD, residual.take_addends())
        return hidden_SD
