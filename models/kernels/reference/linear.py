"""Products of any weight in plain torch."""

import torch

from models.weights.float8 import BLOCK, BlockScaled, GroupScaled, Weight


def linear(x_TX: torch.Tensor, weight_DX: Weight) -> torch.Tensor:
    """x @ weight.T; of a float8 matrix with the input rounded likewise."""
    if isinstance(weight_DX, BlockScaled):
        return (GroupScaled.quantized(x_TX).dequantized() @ weight_DX.dequantized().t()).to(x_TX.dtype)
    return x_TX @ weight_DX.t()


def rows_of(weight: Weight, index: int, count: int) -> Weight:
    """Matrix `index` of `count` equal ones that lie below each other."""
    rows = slice(index * (len(weight) // count), (index + 1) * (len(weight) // count))
    if isinstance(weight, BlockScaled):
        return BlockScaled(weight.values[rows], weight.padded_scales[rows.start // BLOCK : rows.stop // BLOCK])
    return weight[rows]
