"""Operations that each backend implements. Products with a matrix depend on its format and are in `models.weights.matrix`."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from models.kernels.stream import Normed, Residual, RowClass
from models.weights.matrix import Matrix

FLOAT8 = torch.float8_e4m3fn
MOST_FLOAT8 = 448.0  # its largest value
KVPool = tuple[torch.Tensor, torch.Tensor]  # k and v, each (num_blocks, page_size, KV heads, K), contiguous

PIXEL_OFFSET = 128  # patches contain pixel - 128
DELTA_CHUNK = 64
TAP_BITS = 22  # weights of a resampling are integers that sum to 1 << TAP_BITS


@dataclass(frozen=True, slots=True)
class Taps:
    """Resampling of one axis: pixel i is the weighted sum of the source pixels from `first[i]` on, rounded to uint8. Weights beyond the
    source are zero. int32, on the images' device."""

    first: torch.Tensor  # (new size,)
    weights: torch.Tensor  # (new size, taps)


@dataclass(frozen=True, slots=True)
class NewHeads:
    """New heads to normalise (unless weights are None), rotate and store. `cos_sin_TK` rotates as many of a
    head's first values as it has columns."""

    qkv_TX: torch.Tensor  # may be a slice of columns
    q_weight_K: torch.Tensor | None
    k_weight_K: torch.Tensor | None
    eps: float
    cos_sin_TK: torch.Tensor
    slots_T: torch.Tensor
    scales: tuple[float, float] = (1.0, 1.0)  # of keys and values in a pool of float8


@dataclass(frozen=True, slots=True)
class StateRows:
    """Tokens of each row: row r has tokens `starts_R1[r] : starts_R1[r + 1]`, possibly none; rows `num_prefill_rows :` have few.
    Every token belongs to a row. A prefill row may continue the previous row with the next chunk of the same prompt."""

    rows_R: torch.Tensor  # (R,) int64: indices of their states
    starts_R1: torch.Tensor  # (R + 1,) int32
    num_prefill_rows: int
    chains: tuple[torch.Tensor, torch.Tensor] | None = None  # see `origins`

    @property
    def origins(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row whose state each row or chain of chunks starts from, (R,) int64, and the first token, (R,) int32. A chain ends in
        the row that it starts from; its other chunks have more tokens than a convolution has inputs."""
        return self.chains or (self.rows_R, self.starts_R1[:-1])


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Inputs and weights of `layers.delta` for one rank's heads. Value head h belongs to key head h * key heads / value heads."""

    inputs_TX: torch.Tensor  # queries and keys of the key heads, values and z of the value heads
    gates_TX: torch.Tensor  # b, then a, of the value heads
    conv_CW: torch.Tensor
    a_log_H: torch.Tensor  # float32
    dt_bias_H: torch.Tensor  # float32
    norm_V: torch.Tensor
    eps: float
    num_key_heads: int
    key_dim: int


@dataclass(frozen=True, slots=True)
class DeltaState:
    """States of all permanent rows, updated in place; zeros for a new row. `recurrent_RHKV` and the first inputs are the state after the
    first token of a decode row's last step. The next step continues after the first `num_accepted_R` of its D draft tokens."""

    recurrent_RHKV: torch.Tensor  # float32, or bfloat16: states are rounded after each row, and after each token that decodes
    inputs_RWC: torch.Tensor  # inputs of the convolution: the last (kernel - 1) in order, then those of the drafts
    mixed_RDC: torch.Tensor  # of the drafts, after the convolution, in the backend's layout
    gates_RDG: torch.Tensor  # of the drafts
    num_accepted_R: torch.Tensor  # int64

    @classmethod
    def of(
        cls, bytes_RB: torch.Tensor, num_accepted_R: torch.Tensor, shape_HKV: tuple[int, int, int], conv_CW: torch.Tensor, num_drafts: int,
        dtype: torch.dtype = torch.float32,
    ) -> "DeltaState":  # fmt: skip
        """Return views of these bytes, states of this type, for a layer with such a convolution."""
        (channels, kernel_size), size = conv_CW.shape, dtype.itemsize * torch.Size(shape_HKV).numel()
        shapes = (kernel_size - 1 + num_drafts, channels), (num_drafts, channels), (num_drafts, 2 * shape_HKV[0])
        ends = np.cumsum([count * width for count, width in shapes]).tolist()
        parts = bytes_RB[:, size:].view(conv_CW.dtype).tensor_split(ends, dim=1)
        inputs_RWC, mixed_RDC, gates_RDG = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=False))
        return cls(bytes_RB[:, :size].view(dtype).unflatten(1, shape_HKV), inputs_RWC, mixed_RDC, gates_RDG, num_accepted_R)


@dataclass(frozen=True, slots=True)
class Experts:
    """SwiGLU experts `first : first + count` of all, and the router. Rows of `gate_up`: an expert's gate and up projections, then the
    next expert's. With `has_shared`, one more expert at the end applies to every token; a row after the router's rows gives its weight, and
    further rows are padding."""

    router_ED: torch.Tensor
    gate_up: Matrix  # (count * 2 * inner, D)
    down: Matrix  # (count * D, inner), of the same format
    first: int
    count: int
    num_experts: int  # number of the router's choices, over all ranks
    num_chosen: int  # for a token
    has_shared: bool = False

    @property
    def num_given(self) -> int:
        """Return the number of experts per token."""
        return self.num_chosen + self.has_shared


class Ops(Protocol):
    """Operations of a backend. Names that end in an underscore modify an argument."""

    def norm(self, x_TD: Normed) -> torch.Tensor:
        """Return the normalised values."""

    def sparse_swiglu(self, x_TD: Normed, experts: Experts, rows: RowClass, valid_T: torch.Tensor | None) -> torch.Tensor:
        """Return (S, T, D), whose sum over S is the output of these experts weighted by the router.

        Weights: float32 softmax of the logits x @ router.T, which have x's dtype; the `num_chosen` largest are divided by their sum;
        the shared expert's is the sigmoid of its logit. All are rounded to x's dtype. Padding (not in `valid_T`; None: no padding) and
        tokens of other experts get 0.
        """

    def add_experts_(self, residual: Residual, x_TD: Normed, experts: Experts, rows: RowClass, valid_T: torch.Tensor | None) -> None:
        """residual += the sum of `sparse_swiglu`."""

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return gelu_tanh(x @ weight.T + bias) for a two-dimensional x."""

    def layer_norm(self, x: torch.Tensor, offset_D: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the LayerNorm of x + offset over the last of two dimensions. `offset_D` is float32, repeated if x is wider."""

    def rotary_rows(self, positions_AT: torch.Tensor, axis_J: torch.Tensor, inv_freq_J: torch.Tensor) -> torch.Tensor:
        """Return (T, K) float32, K / 2 cosines then K / 2 sines: the j-th of the position on axis `axis_J[j]` times `inv_freq_J[j]`."""

    def norm_rope_store_(self, heads: NewHeads, pool: KVPool) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values in the pool, and return the queries (T, H, K).

        `qkv_TX` (T, (H + 2 * KV heads) * K) may be overwritten; `cos_sin_TK`: see `rotary_rows`; token t goes to slot block * page_size +
        offset = `slots_T[t]`. Values that are not finite are stored as 0: kernels multiply values after a row's end by 0.
        In a pool of float8, they are divided by their scales; larger ones become the largest, NaN becomes 0.
        """

    def gate_(self, x_TX: torch.Tensor, gate_TG: torch.Tensor) -> None:
        """x *= sigmoid(gate), in float32; each gate applies to X / G neighbouring values. `gate_TG` may be a slice of columns."""

    def delta_rule_(self, heads: DeltaHeads, state: DeltaState, rows: StateRows) -> torch.Tensor:
        """Return (T, H * V), norm(o) * silu(z) of `layers.delta`, and update the rows' states as in `DeltaState`. Rows of prompts are
        computed in chunks of `DELTA_CHUNK` from their first tokens, others token by token: rounding depends on the cuts, but not on
        batches or drafts."""

    def resample(self, image_HWC: torch.Tensor, axis: int, taps: Taps) -> torch.Tensor:
        """Resample the height (axis 0) or width (1) of a uint8 image."""

    def resample_to_patches_(
        self, image_HWC: torch.Tensor, axis: int, taps: Taps, patch_size: int, merge_size: int, out_PX: torch.Tensor
    ) -> None:
        """Resample, then write pixels minus 128 to patches `out_PX` (P, C * patch_size ** 2), each (C, y, x), in merge-block order (block
        row, block column, row in block, column in block)."""
