"""Gated DeltaNet: attention with one matrix per head as its cache, for any sequence length (arXiv 2412.06464, and a convolution before it).

    x ── in_proj ──┬─ q, k, v ── conv over 4 tokens, SiLU ──▶ delta rule: S = e^g S + k (beta (v - (e^g S)' k))',  o = S' q
                   ├─ z ────────────────────────────────────────────────────▶ norm(o) * silu(z) ── out_proj ──▶
                   └─ a, b ── g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)

The formula is that of transformers' `Qwen3_5GatedDeltaNet`. A state in the cache is S (value heads, key dim, value dim) in float32 or
bfloat16, then in the model's dtype the last inputs of the convolution (kernel - 1, channels), then the inputs of tokens to verify.
"""

from collections.abc import Iterator

import torch
from torch import nn

from models.cache.states import RowStates
from models.checkpoint.names import CheckpointTensor
from models.config.formats import PLAIN
from models.config.types import DeltaConfig, TextConfig
from models.kernels.ops import DeltaHeads, DeltaState
from models.kernels.stream import Normed, Residual, RowClass
from models.layers.decoder import LayerContext, Mixer
from models.layers.linear import FusedColumnParallelLinear, Part, RowParallelLinear, Setup, even_part, placed
from models.parallel.group import TensorParallel


class Convolution(nn.Module):
    """Convolution of each channel over the last tokens; this rank's channels."""

    def __init__(self, parts: list[Part], kernel_size: int, setup: Setup) -> None:
        super().__init__()
        self._parts = parts
        self.weight = setup.parameter(sum(part.rows for part in parts), kernel_size)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        for part, own in placed(self._parts):
            shape, index = (part.total_rows, 1, self.weight.shape[1]), (slice(part.start, part.start + part.rows),)
            yield CheckpointTensor(f"{prefix}.weight", shape, index, self.weight.data[own, None])


class HeadValues(nn.Module):
    """One float32 value per value head of this rank."""

    def __init__(self, num_heads: int, setup: Setup) -> None:
        super().__init__()
        self.tp = setup.tp
        self.values = setup.parameter(setup.tp.share(num_heads, "linear_num_value_heads"), dtype=torch.float32)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        count = len(self.values)
        yield CheckpointTensor(prefix, (count * self.tp.size,), (self.tp.own(count),), self.values.data)


class GatedDeltaNet(Mixer):
    """Projections around the delta rule; this rank's heads."""

    def __init__(self, layer: int, config: TextConfig, setup: Setup) -> None:
        super().__init__()
        assert config.delta is not None
        self.ordinal, self.ops, self.eps = config.ordinal(layer), setup.ops, config.rms_norm_eps
        self._delta, hidden, num_heads = config.delta, config.hidden_size, config.delta.num_value_heads
        width = num_heads * config.delta.value_dim
        heads, self._num_key_heads = _head_parts(config.delta, setup.tp)
        path, parts = f"{config.layer_path(layer)}.self_attn", [*heads, even_part("in_proj_z", width, setup.tp)]
        self.in_proj = FusedColumnParallelLinear(hidden, parts, config.format_of(path, "in_proj_qkv", "in_proj_z"), setup)
        names = "in_proj_b", "in_proj_a"
        format = PLAIN if config.ruled_format(f"{path}.in_proj_b") is None else config.format_of(path, *names)  # small: plain by default
        self.in_gates = FusedColumnParallelLinear(hidden, [even_part(name, num_heads, setup.tp) for name in names], format, setup)
        self.conv1d = Convolution(heads, config.delta.kernel_size, setup)
        self.A_log, self.dt_bias = HeadValues(num_heads, setup), HeadValues(num_heads, setup)
        self.norm = nn.ParameterDict({"weight": setup.parameter(config.delta.value_dim)})
        self.out_proj = RowParallelLinear(width, hidden, config.format_of(path, "out_proj"), setup)

    def forward(self, x_TD: Normed, context: LayerContext) -> torch.Tensor:
        """Return (T, H * V), the input of `out_proj`."""
        assert context.states is not None and context.rows is not None
        inputs_TX = self.in_proj.weight.product(x_TD, context.row_class)  # the larger product first: 2 % faster for a single token
        gates_TX = self.in_gates.weight.product(x_TD.settled(), context.row_class)
        weights = self.conv1d.weight, self.A_log.values, self.dt_bias.values, self.norm["weight"], self.eps
        heads = DeltaHeads(inputs_TX, gates_TX, *weights, self._num_key_heads, self._delta.key_dim)
        return self.ops.delta_rule_(heads, self._state(context.states), context.rows)

    def store(self, x_TD: Normed, context: LayerContext) -> None:
        self.forward(x_TD, context)

    def cached(self, context: LayerContext) -> tuple[torch.Tensor, ...]:
        assert context.states is not None
        return (context.states.layer(self.ordinal),)

    def add_(self, residual: Residual, mixed_TX: torch.Tensor, rows: RowClass) -> None:
        self.out_proj.add_(residual, mixed_TX, rows)

    def _state(self, states: RowStates) -> DeltaState:
        shape = len(self.A_log.values), self._delta.key_dim, self._delta.value_dim
        dtype = torch.bfloat16 if self._delta.has_bfloat16_state else torch.float32
        return DeltaState.of(states.layer(self.ordinal), states.num_accepted, shape, self.conv1d.weight, states.num_verified, dtype)


def _head_parts(delta: DeltaConfig, tp: TensorParallel) -> tuple[list[Part], int]:
    """Return this rank's parts of the matrix of queries, keys and values, and its number of key heads."""
    num_keys, num_values = tp.share(delta.num_key_heads, "linear_num_key_heads"), tp.share(delta.num_value_heads, "linear_num_value_heads")
    keys, values = num_keys * delta.key_dim, num_values * delta.value_dim
    parts, first = [], 0
    for rows in (keys, keys, values):
        parts.append(Part("in_proj_qkv", delta.conv_width, first + tp.rank * rows, rows))
        first += rows * tp.size
    return parts, num_keys
