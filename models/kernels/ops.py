"""The operations that each backend implements, besides products with a matrix, which are of its format: see `models.weights.matrix`."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from models.kernels.stream import Normed, Residual, RowClass
from models.weights.matrix import Matrix

KVPool = tuple[torch.Tensor, torch.Tensor]  # k and v, each (num_blocks, page_size, KV heads, K), contiguous

PIXEL_OFFSET = 128  # patches hold pixel - 128
DELTA_CHUNK = 64
TAP_BITS = 22  # weights of a resampling are integers that sum to 1 << TAP_BITS


@dataclass(frozen=True, slots=True)
class Taps:
    """Resampling of one axis: pixel i is the weighted sum of the source's pixels `first[i] ...`, rounded to uint8. Weights past the source
    are zero. int32, on the images' device."""

    first: torch.Tensor  # (new size,)
    weights: torch.Tensor  # (new size, taps)


@dataclass(frozen=True, slots=True)
class NewHeads:
    """New heads, to be normalised, unless weights are None, rotated and stored. `cos_sin_TK` rotates as many of a
    head's first values as it has columns."""

    qkv_TX: torch.Tensor  # a slice of columns, maybe
    q_weight_K: torch.Tensor | None
    k_weight_K: torch.Tensor | None
    eps: float
    cos_sin_TK: torch.Tensor
    slots_T: torch.Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which of a step's tokens are whose: row r has tokens `starts_R1[r] : starts_R1[r + 1]`, none or more; rows `num_prefill_rows :` have
    few. All tokens are somebody's. Of the others some may go on where the row before ends, with the next chunk of the same prompt."""

    rows_R: torch.Tensor  # (R,) int64: where their states go
    starts_R1: torch.Tensor  # (R + 1,) int32
    num_prefill_rows: int
    chains: tuple[torch.Tensor, torch.Tensor] | None = None  # see `origins`

    @property
    def origins(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row, or of the one where its chain of chunks begins: from which row's state it goes on, (R,) int64, and the first token,
        (R,) int32. A chain ends in the row that it goes on from; what it leaves between has more tokens than a convolution has inputs."""
        return self.chains or (self.rows_R, self.starts_R1[:-1])


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Inputs and weights of `layers.delta`, of heads of one rank. Value head h belongs to key head h * key heads / value heads."""

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
    """Of all permanent rows, changed in place. A row that begins has zeros. `recurrent_RHKV` and the first inputs hold behind the first
    token of a decode row's last step; the first `num_accepted_R` of its D drafts hold, too, and the step that comes goes on behind them."""

    recurrent_RHKV: torch.Tensor  # float32
    inputs_RWC: torch.Tensor  # of the convolution: the last (kernel - 1), the latest one last, then those of the drafts
    mixed_RDC: torch.Tensor  # of the drafts, behind the convolution, as the backend has it
    gates_RDG: torch.Tensor  # of the drafts
    num_accepted_R: torch.Tensor  # int64

    @classmethod
    def of(
        cls, bytes_RB: torch.Tensor, num_accepted_R: torch.Tensor, shape_HKV: tuple[int, int, int], conv_CW: torch.Tensor, num_drafts: int
    ) -> "DeltaState":
        """Views of these bytes, of a layer with such a convolution."""
        (channels, kernel_size), size = conv_CW.shape, 4 * torch.Size(shape_HKV).numel()
        shapes = (kernel_size - 1 + num_drafts, channels), (num_drafts, channels), (num_drafts, 2 * shape_HKV[0])
        ends = np.cumsum([count * width for count, width in shapes]).tolist()
        parts = bytes_RB[:, size:].view(conv_CW.dtype).tensor_split(ends, dim=1)
        inputs_RWC, mixed_RDC, gates_RDG = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=False))
        return cls(bytes_RB[:, :size].view(torch.float32).unflatten(1, shape_HKV), inputs_RWC, mixed_RDC, gates_RDG, num_accepted_R)


@dataclass(frozen=True, slots=True)
class Experts:
    """SwiGLU experts `first : first + count` of all, and the router. Rows of `gate_up`: an expert's gate, its other factor, the next
    expert's. With `has_shared`, one more expert behind all is given to every token; behind the router's rows is then a row for its weight,
    and further ones mean nothing."""

    router_ED: torch.Tensor
    gate_up: Matrix  # (count * 2 * inner, D)
    down: Matrix  # (count * D, inner), of the same format
    first: int
    count: int
    num_experts: int  # that the router chooses from, of all ranks
    num_chosen: int  # for a token
    has_shared: bool = False

    @property
    def num_given(self) -> int:
        """Experts of a token."""
        return self.num_chosen + self.has_shared


class Ops(Protocol):
    """Names that end in an underscore change an argument."""

    def norm(self, x_TD: Normed) -> torch.Tensor:
        """Its values."""

    def sparse_swiglu(self, x_TD: Normed, experts: Experts, rows: RowClass, real_T: torch.Tensor | None) -> torch.Tensor:
        """(S, T, D) whose sum over S is what these experts give their tokens, times the router's weights.

        Weights: a float32 softmax of the logits x @ router.T, which have x's dtype; its `num_chosen` largest are divided by their sum;
        the shared expert's is the sigmoid of its logit. All are rounded to x's dtype. Tokens that are not `real_T` (None: all are), and
        those of other experts, get 0.
        """

    def add_experts_(self, residual: Residual, x_TD: Normed, experts: Experts, rows: RowClass, real_T: torch.Tensor | None) -> None:
        """residual += the sum of `sparse_swiglu`."""

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """gelu_tanh(x @ weight.T + bias) for x of two dimensions."""

    def layer_norm(self, x: torch.Tensor, offset_D: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """LayerNorm of x + offset over the last of two dimensions. `offset_D` is float32, repeated if x is wider."""

    def rotary_rows(self, positions_AT: torch.Tensor, axis_J: torch.Tensor, inv_freq_J: torch.Tensor) -> torch.Tensor:
        """(T, K) float32, K / 2 cosines then K / 2 sines: the j-th of the token's position on axis `axis_J[j]` times `inv_freq_J[j]`."""

    def norm_rope_store_(self, heads: NewHeads, pool: KVPool) -> torch.Tensor:
        """RMSNorm and rotation of queries and keys, then keys and values into the pool. Returns the queries (T, H, K).

        `qkv_TX` (T, (H + 2 * KV heads) * K) may be overwritten; `cos_sin_TK`: see `rotary_rows`; token t goes to slot block * page_size +
        offset = `slots_T[t]`. Values that are not finite are stored as 0: kernels multiply what lies behind a row's end by 0.
        """

    def gate_(self, x_TX: torch.Tensor, gate_TG: torch.Tensor) -> None:
        """x *= sigmoid(gate), in float32; each gate is that of X / G neighbouring values. `gate_TG` may be a slice of columns."""

    def delta_rule_(self, heads: DeltaHeads, state: DeltaState, rows: StateRows) -> torch.Tensor:
        """(T, H * V): norm(o) * silu(z) of `layers.delta`, from the rows' states, which go on as `DeltaState` says. Rows of prompts are
        computed in chunks of `DELTA_CHUNK` that begin with their first tokens, others token by token: cuts change how sums are rounded,
        batches do not, and drafts do not either."""

    def resample(self, image_HWC: torch.Tensor, axis: int, taps: Taps) -> torch.Tensor:
        """A uint8 image with its height (axis 0) or width (1) resampled."""

    def resample_to_patches_(
        self, image_HWC: torch.Tensor, axis: int, taps: Taps, patch_size: int, merge_size: int, out_PX: torch.Tensor
    ) -> None:
        """As `resample`, then pixels minus 128 into patches `out_PX` (P, C * patch_size ** 2), each (C, y, x), in merge-block order (block
        row, block column, row in block, column in block)."""
