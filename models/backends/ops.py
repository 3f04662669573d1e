"""The operations that have one implementation a backend, behind one Protocol. `torch` is the reference; see `models.backends`.

A layer reads like the paper: it normalises the residual stream, multiplies, and adds to the stream. When and in which kernel that is done
is the backend's business: what stands between two products (`Activation`) and what a product leaves for the stream (`Product`) may be
values, or how to get them.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from models.layers.fp8 import Weight
from models.parallel import Unsummed

KVPool = tuple[torch.Tensor, torch.Tensor]  # k and v, each (num_blocks, page_size, KV heads, K), contiguous
Activation = Any  # (T, X) values, or what a backend's own `linear` makes of them: rounded to float8, or not yet normalised

PIXEL_OFFSET = 128  # patches hold pixel - 128
TAP_BITS = 22  # weights of a resampling are integers that sum to 1 << TAP_BITS


@dataclass(frozen=True, slots=True)
class Taps:
    """Resampling of one axis: pixel i of the result is the weighted sum of the source's pixels `first[i] ...`, then rounded to uint8.

    Weights that would lie behind the last source pixel are zero. int32, on the images' device.
    """

    first: torch.Tensor  # (new size,)
    weights: torch.Tensor  # (new size, taps)


@dataclass(frozen=True, slots=True)
class Product:
    """input @ weight.T, (T, D), for the residual stream: not multiplied yet."""

    input_TX: Activation
    weight_DX: Weight


@dataclass(frozen=True, slots=True)
class Addends:
    """(S, T, D) whose sum over S is for the residual stream: not added up yet."""

    parts_STD: torch.Tensor


class LateAddend(Protocol):
    """(1, T, D) for the residual stream: not multiplied yet. One of the two is asked for, once."""

    @property
    def parts_STD(self) -> torch.Tensor:
        """As those of `Addends`."""

    def add_to_(self, stream_TD: torch.Tensor) -> None:
        """stream += the addend."""


@dataclass(frozen=True, slots=True)
class Experts:
    """SwiGLU experts `first : first + count` of all, with the router's matrix. Experts' rows lie one expert's after another's.

    An expert has `inner` values between its two products: rows of its `gate_up` are those of the gate, then as many of the other factor.
    """

    router_ED: torch.Tensor
    gate_up: Weight  # (count * 2 * inner, D)
    down: Weight  # (count * D, inner)
    first: int
    count: int
    num_chosen: int  # experts of a token


class Residual(Protocol):
    """The residual stream of a step, (T, D). It may lack addends until it is normalised: what reads `sum_TD` otherwise must not mind."""

    sum_TD: torch.Tensor

    def add_(self, addend: Product | Addends | LateAddend | Unsummed | torch.Tensor) -> None:
        """residual += addend. Between two of these the stream is normalised."""

    def keep_(self, tokens_S: torch.Tensor) -> None:
        """The stream of these tokens alone, which has been normalised since it was added to."""


class Ops(Protocol):
    """Methods that end in an underscore change an argument in place, as said there.

    A `Weight` may be float8: then the input of the product is rounded as `fp8.GroupScaled` says.
    """

    def residual(self, hidden_TD: torch.Tensor) -> Residual:
        """A residual stream that begins with these values, which it may overwrite."""

    def normed(self, residual: Residual, weight_D: torch.Tensor, eps: float) -> Activation:
        """RMSNorm of the stream, x / sqrt(mean(x ** 2) + eps) * weight, for products of this layer only: the stream goes on changing."""

    def rms_norm(self, residual: Residual, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """The same as values."""

    def linear(self, x_TX: Activation, weight_DX: Weight, out_TD: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight.T. Written to `out_TD` if that is given."""

    def swiglu(self, x_TX: Activation, weight_NX: Weight) -> Activation:
        """silu(first half) * second half of the last dimension of x @ weight.T."""

    def sparse_swiglu(self, x_TD: Activation, experts: Experts, real_T: torch.Tensor | None) -> Addends | LateAddend:
        """What these experts give the tokens that the router gives them, times the router's weights, for the residual.

        Of the logits x @ router.T, which have x's dtype, a float32 softmax; its `num_chosen` largest are divided by their sum and rounded
        to x's dtype. Tokens that are not `real_T` (None: all are) go to no expert; they, and tokens of other experts, get zeros.
        """

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """gelu_tanh(x @ weight.T + bias) for x of two dimensions."""

    def linear_f32(self, x_SD: torch.Tensor, weight_VD: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight.T in float32, whatever the inputs: rounded logits would tie. Written to `out_SV` if that is given."""

    def layer_norm(self, x: torch.Tensor, offset_D: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """LayerNorm of x + offset over the last of two dimensions. `offset_D` is float32 and is repeated if x is wider."""

    def rotary_rows(self, positions_AT: torch.Tensor, axis_J: torch.Tensor, inv_freq_J: torch.Tensor) -> torch.Tensor:
        """(T, K) float32, K / 2 cosines then K / 2 sines: the j-th are of the token's position on axis `axis_J[j]` times `inv_freq_J[j]`.

        Positions are integers of A axes, whose tokens follow each other without gaps.
        """

    def norm_rope_store_(
        self,
        qkv_TX: torch.Tensor,
        q_weight_K: torch.Tensor,
        k_weight_K: torch.Tensor,
        eps: float,
        cos_sin_TK: torch.Tensor,
        pool: KVPool,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """RMSNorm and rotation of every query and key head, then keys and values into the pool. Returns the queries (T, H, K).

        `qkv_TX` is (T, (H + 2 * KV heads) * K) and may be overwritten; `cos_sin_TK` is float32, K / 2 cosines then K / 2 sines; token t
        is written to `pool` at block * page_size + offset = `slots_T[t]`. A value (not a key) that is not finite is stored as 0: kernels
        multiply what an earlier request left behind a row's end by 0, and the product must be 0.
        """

    def resample(self, image_HWC: torch.Tensor, axis: int, taps: Taps) -> torch.Tensor:
        """A uint8 image with its height (axis 0) or width (axis 1) resampled."""

    def resample_to_patches_(
        self, image_HWC: torch.Tensor, axis: int, taps: Taps, patch_size: int, merge_size: int, out_PX: torch.Tensor
    ) -> None:
        """As `resample`, then cut into patches: `out_PX` (P, C * patch_size ** 2) is filled with the pixels minus 128.

        Patches are in merge-block order (block row, block column, row in block, column in block), a patch is (C, y, x).
        """
