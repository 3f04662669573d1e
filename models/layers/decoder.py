"""Decoder components: attention over the paged cache, SwiGLU, and the layer of both."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from models.cache.states import RowStates
from models.checkpoint.names import CheckpointTensor
from models.config.types import TextConfig
from models.kernels.ops import NewHeads, StateRows
from models.kernels.paged import AttentionBackend, FusedAttention
from models.kernels.stream import Activation, Normed, Residual, RowClass
from models.layers.linear import FusedColumnParallelLinear, Part, RowParallelLinear, Setup, even_part
from models.layers.moe import MLP, SparseMoe
from models.parallel.group import kv_heads_of


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Data shared by all layers of a step."""

    attention: AttentionBackend
    fused: FusedAttention | None  # also computes and stores heads, if available
    row_class: RowClass  # of the tokens
    wanted_class: RowClass  # of the tokens that continue after the last layer's keys are stored
    cos_sin_TK: torch.Tensor  # rotary rows of the tokens
    slots_T: torch.Tensor  # KV slots of the tokens
    valid_T: torch.Tensor | None  # valid tokens (the rest is padding), for layers of experts; None: all
    states: RowStates | None = None  # of the layers with recurrent states
    rows: StateRows | None = None  # tokens of each row, for these layers


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension; whole on every rank. With an offset the factor is float32, as in transformers."""

    def __init__(self, size: int, eps: float, setup: Setup) -> None:
        super().__init__()
        self.eps, self.offset = eps, setup.norm_offset
        self.weight = setup.parameter(size, dtype=torch.float32 if self.offset else None)

    def forward(self, residual: Residual) -> Normed:
        """Return the normalised stream for the products of one layer."""
        return residual.normed(self.weight, self.eps)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{prefix}.weight", tuple(self.weight.shape), (slice(None),), self.weight.data, self.offset)


class Mixer(nn.Module, ABC):
    """Token mixer of the first half of a layer."""

    @abstractmethod
    def forward(self, x_TD: Normed, context: LayerContext) -> torch.Tensor:
        """Return (T, X), the input of `add_`. Cached values of the tokens are written to the layer's cache."""

    @abstractmethod
    def store(self, x_TD: Normed, context: LayerContext) -> None:
        """Only store the cached values; the layer's output is not needed."""

    @abstractmethod
    def cached(self, context: LayerContext) -> tuple[torch.Tensor, ...]:
        """Return the memory of the layer's cache."""

    @abstractmethod
    def add_(self, residual: Residual, mixed_TX: torch.Tensor, rows: RowClass) -> None:
        """residual += the product of the output projection."""


class SelfAttention(Mixer):
    """Projections around the paged attention; this rank's heads. If `is_gated`, each head's output is multiplied by the sigmoid of a gate,
    whose rows follow those of the head's query in the checkpoint."""

    def __init__(self, layer: int, config: TextConfig, setup: Setup, is_gated: bool = False, input_size: int | None = None) -> None:
        super().__init__()
        self.layer = config.ordinal(layer)
        self.ops = setup.ops
        width, head_dim = config.num_heads * config.head_dim, config.head_dim
        first_kv, num_kv = kv_heads_of(config.num_kv_heads, setup.tp)
        kv_rows = config.num_kv_heads * head_dim, first_kv * head_dim, num_kv * head_dim
        queries = [even_part("q_proj", width, setup.tp)]
        gates: list[Part] = []
        if is_gated:
            queries, gates = ([_head_rows(queries[0], head_dim, i, half) for i in range(queries[0].rows // head_dim)] for half in (0, 1))
        parts = *queries, Part("k_proj", *kv_rows), Part("v_proj", *kv_rows), *gates
        self._gate_width = sum(part.rows for part in gates)
        path = f"{config.layer_path(layer)}.self_attn"
        format = config.format_of(path, "q_proj", "k_proj", "v_proj")
        self.qkv_proj = FusedColumnParallelLinear(input_size or config.hidden_size, parts, format, setup)
        self.cache_scales = 1.0, 1.0  # of keys and values in float8
        self._norms: tuple[torch.Tensor | None, torch.Tensor | None, float] = None, None, 0.0
        if config.has_qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, setup)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, setup)
            self._norms = self.q_norm.weight, self.k_norm.weight, config.rms_norm_eps
        self.o_proj = RowParallelLinear(width, config.hidden_size, config.format_of(path, "o_proj"), setup)

    def forward(self, x_TD: Activation, context: LayerContext) -> torch.Tensor:
        """Return (T, H * K), the input of `o_proj`."""
        heads, gate_TX = self._new_heads(x_TD, context)
        if context.fused is not None and gate_TX is None:
            return context.fused.run_fused(self.layer, heads).flatten(1)
        attended_TX = context.attention.run(self.layer, self._store(heads, context)).flatten(1)
        if self.cache_scales[1] != 1.0:
            attended_TX *= self.cache_scales[1]
        if gate_TX is not None:
            self.ops.gate_(attended_TX, gate_TX)
        return attended_TX

    def store(self, x_TD: Activation, context: LayerContext) -> None:
        self._store(self._new_heads(x_TD, context)[0], context)

    def cached(self, context: LayerContext) -> tuple[torch.Tensor, ...]:
        return context.attention.pool(self.layer)

    def add_(self, residual: Residual, mixed_TX: torch.Tensor, rows: RowClass) -> None:
        self.o_proj.add_(residual, mixed_TX, rows)

    def _new_heads(self, x_TD: Activation, context: LayerContext) -> tuple[NewHeads, torch.Tensor | None]:
        """Also return the gates (T, H * K), if there are any."""
        qkv_TX, gate_TX = self.qkv_proj.weight.product(x_TD, context.row_class), None
        if self._gate_width:
            qkv_TX, gate_TX = qkv_TX.tensor_split((-self._gate_width,), dim=1)
        return NewHeads(qkv_TX, *self._norms, context.cos_sin_TK, context.slots_T, self.cache_scales), gate_TX

    def _store(self, heads: NewHeads, context: LayerContext) -> torch.Tensor:
        q_THK = self.ops.norm_rope_store_(heads, context.attention.pool(self.layer))
        return q_THK if self.cache_scales[0] == 1.0 else q_THK * self.cache_scales[0]


def _head_rows(queries: Part, head_dim: int, head: int, half: int) -> Part:
    """Return the rows of a head's query (half 0) or gate (1) in a matrix that has both for each head."""
    return Part(queries.name, 2 * queries.total_rows, 2 * (queries.start + head * head_dim) + half * head_dim, head_dim)


class DecoderLayer(nn.Module):
    """A pre-norm transformer layer around a token mixer."""

    def __init__(self, layer: int, mixer: Mixer, config: TextConfig, setup: Setup) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, setup)
        self.self_attn = mixer
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, setup)
        moe, path = config.moe, f"{config.layer_path(layer)}.mlp"
        self.mlp: MLP | SparseMoe
        if moe is None:
            of_all = config.format_of(path, "gate_proj", "up_proj", "down_proj")  # SwiGLU is rounded to the input format of its product
            self.mlp = MLP(config.hidden_size, config.intermediate_size, of_all, setup)
        else:
            names = ("experts", "shared_expert") if moe.has_shared else ("experts",)
            self.mlp = SparseMoe(config.hidden_size, moe, config.format_of(path, *names), setup)

    def forward(self, residual: Residual, context: LayerContext, wanted_S: torch.Tensor | None = None) -> None:
        """residual += mixed tokens, then residual += MLP. With `wanted_S`, only these tokens continue after their keys are stored."""
        self.run(residual, self.input_layernorm(residual), context, wanted_S)

    def run(self, residual: Residual, x_TX: Activation, context: LayerContext, wanted_S: torch.Tensor | None) -> None:
        """As `forward`, with the mixer's input."""
        mixed_TX, valid_T, rows = self.self_attn(x_TX, context), context.valid_T, context.row_class
        if wanted_S is not None:
            rows, valid_T = context.wanted_class, None if valid_T is None else valid_T[wanted_S]
            mixed_TX = mixed_TX[wanted_S]
            residual.keep_(wanted_S)
        self.self_attn.add_(residual, mixed_TX, rows)
        self.mlp.add_(residual, self.post_attention_layernorm(residual), rows, valid_T)

    def store(self, residual: Residual, context: LayerContext) -> None:
        """Only cache the tokens."""
        self.self_attn.store(self.input_layernorm(residual), context)


MakeLayer = Callable[[int, TextConfig, Setup], DecoderLayer]  # layer i of a decoder
