"""Products of low-bit integers by the library humming-kernels, which compiles kernels for each shape when it first meets it."""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from models.config.schemes import Scheme
from models.kernels.stream import Activation, Residual, Rounded, RowClass
from models.kernels.triton.activations import values_of
from models.kernels.triton.grouped import TritonGrouped
from models.weights.grouped import Grouped
from models.weights.layouts import codes_of, packed_columns, packed_rows
from models.weights.matrix import Stored

ROWS, COLUMNS = 64, 128  # of which a matrix has multiples
NUM_CHECKED, MAX_DIFFERENCE = 3, 0.02  # tokens of the comparison with our kernels, and its relative limit


@dataclass(frozen=True)
class HummingMatrix:
    """A matrix (N, K) as humming's kernels read it: `layer` is its HummingLayer."""

    layer: Any
    shape: torch.Size

    @property
    def stored(self) -> tuple[Stored, ...]:
        """All tensors, none of which a checkpoint has."""
        tensors = self.layer.state_dict().items()
        if not tensors:
            raise ValueError("this version of humming-kernels does not name its tensors: weights cannot be replaced in place")
        return tuple(Stored(name, tensor) for name, tensor in tensors)

    @classmethod
    def of(cls, matrix: Grouped) -> "HummingMatrix":
        from humming.layer import HummingLayer

        scheme, dtype = matrix.scheme, torch.bfloat16
        kind = {"dtype": f"uint{scheme.bits}", "group_size": scheme.group, "has_zero_point": matrix.zeros is not None}
        layer = HummingLayer(shape_n=matrix.shape[0], shape_k=matrix.shape[1], weight_config=kind, torch_dtype=dtype)
        layer = layer.to(matrix.codes.device)
        tensors = {
            "weight": packed_columns(codes_of(matrix.codes, scheme, matrix.layout), scheme.bits),
            "weight_scale": matrix.scales.to(dtype),
        }
        if matrix.zeros is not None:
            tensors["zero_point"] = packed_rows(matrix.zeros, scheme.bits)
        layer.load_from_tensors(tensors)
        layer.transform()
        return cls(layer, matrix.shape)


def takes(matrix: Grouped) -> bool:
    """Whether humming's kernels multiply it."""
    rows, columns = matrix.shape
    return matrix.scheme.element.startswith("int") and rows % ROWS == 0 and columns % COLUMNS == 0 and matrix.codes.is_cuda


class HummingProducts(TritonGrouped):
    """`TritonGrouped` multiplies experts and matrices of floats."""

    def __init__(self) -> None:
        self._checked: set[tuple[Scheme, torch.Size]] = set()

    def prepared(self, matrix: Any) -> Any:
        """RuntimeError if the library's product is not ours, which is compared once for each scheme and shape."""
        if not takes(matrix):
            return matrix
        made = HummingMatrix.of(matrix)
        if (key := (matrix.scheme, matrix.shape)) not in self._checked:
            x_TX = torch.randn((NUM_CHECKED, matrix.shape[1]), device=matrix.codes.device).to(torch.bfloat16)
            ours = super().product(x_TX, matrix, RowClass.FEW, None).float()
            if (ours - made.layer(x_TX).float()).norm() > MAX_DIFFERENCE * ours.norm():
                raise RuntimeError(f"humming-kernels and our kernels differ in {matrix.scheme} of {tuple(matrix.shape)}: uninstall it")
            self._checked.add(key)
        return made

    def product(self, x_TX: Activation, matrix: Any, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        if isinstance(matrix, Grouped):
            return super().product(x_TX, matrix, rows, out_TN)
        made: torch.Tensor = matrix.layer(values_of(x_TX), outputs=out_TN)
        return made

    def swiglu(self, x_TX: Activation, matrix: Any, rows: RowClass) -> torch.Tensor | Rounded:
        if isinstance(matrix, Grouped):
            return super().swiglu(x_TX, matrix, rows)
        return self.activated(self.product(x_TX, matrix, rows, None))

    def add_to(self, residual: Residual, x_TX: Activation, matrix: Any, rows: RowClass) -> None:
        if isinstance(matrix, Grouped):
            super().add_to(residual, x_TX, matrix, rows)
        else:
            residual.add_(self.product(x_TX, matrix, rows, None)[None])


def grouped_products() -> TritonGrouped:
    """The fastest that is installed."""
    return HummingProducts() if importlib.util.find_spec("humming") is not None else TritonGrouped()
