"""Products of low-bit integers by the library humming-kernels, which compiles kernels for each shape when it first meets it."""

import importlib.util
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from models.config.schemes import Scheme
from models.kernels.stream import Activation, Residual, Rounded, RowClass
from models.kernels.triton.activations import values_of
from models.kernels.triton.grouped import TritonGrouped
from models.kernels.triton.products import TritonProducts
from models.weights.grouped import STRIPE, Grouped
from models.weights.layouts import codes_of, packed_columns, packed_rows
from models.weights.matrix import Stored

logger = logging.getLogger(__name__)

ROWS, COLUMNS = 64, 128  # multiples of its tiles; the library pads rows
WHOLE_ROWS = 8  # multiple of rows that it writes
TOKENS = (8, 16, 32, 64, 128, 256, 512, 2048)  # each with the kernel that the library takes for so many; it has 34 for a shape
EVERY = 1 << 30
NUM_CHECKED, MAX_DIFFERENCE = 3, 0.02  # tokens of the comparison with our kernels, and its relative limit

Key = tuple[Scheme, torch.Size]

_compilers = ThreadPoolExecutor(8, "humming")


def _compile(config: Any, device: torch.device) -> torch.Tensor:
    """The library's table of kernels by numbers of tokens."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    with torch.cuda.device(device):
        ranges: list[list[Any]] = []
        for last, tokens in zip((0, *TOKENS), TOKENS, strict=False):
            chosen = get_heuristics_config(config, shape_m=tokens, device=device)
            if ranges and ranges[-1][2] == chosen:
                ranges[-1][1] = tokens
            else:
                ranges.append([last, tokens, chosen])
        ranges[-1][1] = EVERY
        return HummingKernel.prepare_kernels(config.to_str(), None, ranges, device)


@cache
def _kernels(config: Any, device: torch.device) -> "Future[torch.Tensor]":
    return _compilers.submit(_compile, config, device)


@dataclass(frozen=True)
class HummingMatrix:
    """A matrix (N, K) as humming's kernels read it: `layer` is its HummingLayer, with `weight`, `weight_scale` and `zero_point`. Its rows
    are padded to a multiple of ROWS; products are not."""

    scheme: Scheme
    layer: Any
    shape: torch.Size
    kernels: "Future[torch.Tensor]"

    @property
    def stored(self) -> tuple[Stored, ...]:
        """All tensors, none of which a checkpoint has."""
        tensors = self.layer.state_dict().items()
        if not tensors:
            raise ValueError("this version of humming-kernels does not name its tensors: weights cannot be replaced in place")
        return tuple(Stored(name, tensor) for name, tensor in tensors)

    @classmethod
    def of(cls, matrix: Grouped) -> "HummingMatrix":
        """Its kernels are compiled in the background."""
        from humming.layer import HummingLayer

        scheme, dtype, device = matrix.scheme, torch.bfloat16, matrix.codes.device
        kind = {"dtype": f"uint{scheme.bits}", "group_size": scheme.group, "has_zero_point": matrix.zeros is not None}
        rows, columns = matrix.shape
        layer = HummingLayer(
            shape_n=rows, shape_k=columns, weight_config=kind, pad_n_to_multiple=ROWS, torch_dtype=dtype
        ).to(device)  # fmt: skip
        stripes = (packed_columns(codes_of(stripe, scheme, matrix.layout), scheme.bits) for stripe in matrix.codes.split(STRIPE))
        tensors = {
            "weight": torch.cat(list(stripes)),
            "weight_scale": matrix.scales.to(dtype),
        }
        if matrix.zeros is not None:
            tensors["zero_point"] = packed_rows(matrix.zeros, scheme.bits)
        layer.load_from_tensors(tensors)
        layer.transform()
        return cls(scheme, layer, matrix.shape, _kernels(layer.humming_config, device))

    @property
    def key(self) -> Key:
        return self.scheme, self.shape

    @property
    def zeros(self) -> torch.Tensor | None:
        zeros: torch.Tensor | None = self.layer.zero_point if self.scheme.has_zeros else None
        return zeros

    def product(self, x_TX: torch.Tensor, out_TN: torch.Tensor | None) -> torch.Tensor:
        from humming.ops import launch_kernel

        layer = self.layer
        scales = {"weight_scale": layer.weight_scale, "zero_point": self.zeros}
        product: torch.Tensor = launch_kernel(
            configs=self.kernels.result(), inputs=x_TX, weight=layer.weight, **scales, outputs=out_TN, locks=layer.locks
        )
        return product


def takes(matrix: Grouped) -> bool:
    """Whether humming's kernels multiply it."""
    rows, columns = matrix.shape
    return matrix.scheme.element.startswith("int") and rows % WHOLE_ROWS == 0 and columns % COLUMNS == 0 and matrix.codes.is_cuda


class HummingMatrices(TritonProducts[HummingMatrix]):
    """See `TritonProducts`."""

    def product_of_many(self, x_TX: Activation, matrix: HummingMatrix, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        return matrix.product(values_of(x_TX), out_TN)

    def product_f32(self, x_TX: torch.Tensor, matrix: HummingMatrix, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        product = self.product(x_TX, matrix, rows, None)
        return product.float() if out_TN is None else out_TN.copy_(product)


class HummingProducts(TritonGrouped):
    """Our kernels multiply experts and matrices of floats, the library the others, unless it cannot compile the first one's kernels."""

    def __init__(self) -> None:
        self._compiles = True
        self._ours, self._library = TritonGrouped(), HummingMatrices()
        self._expected: dict[Key, tuple[torch.Tensor, torch.Tensor] | None] = {}  # tokens and our product; None: it was the library's

    def prepared(self, matrix: Any) -> Any:
        if not (self._compiles and takes(matrix)):
            return matrix
        try:
            made = HummingMatrix.of(matrix)
        except (RuntimeError, OSError) as problem:
            if self._expected or isinstance(problem, torch.OutOfMemoryError):
                raise
            self._compiles = False
            logger.warning("humming-kernels found no CUDA compiler, so low-bit matrices use slower kernels: %s", problem)
            return matrix
        if made.key not in self._expected:
            x_TX = torch.randn((NUM_CHECKED, matrix.shape[1]), device=matrix.codes.device).to(torch.bfloat16)
            self._expected[made.key] = x_TX, self._ours.product(x_TX, matrix, RowClass.FEW, None)
        return made

    def product(self, x_TX: Activation, matrix: Any, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        return self._products_of(matrix).product(x_TX, matrix, rows, out_TN)

    def product_f32(self, x_TX: torch.Tensor, matrix: Any, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        return self._products_of(matrix).product_f32(x_TX, matrix, rows, out_TN)

    def swiglu(self, x_TX: Activation, matrix: Any, rows: RowClass) -> torch.Tensor | Rounded:
        return self._products_of(matrix).swiglu(x_TX, matrix, rows)

    def add_to(self, residual: Residual, x_TX: Activation, matrix: Any, rows: RowClass) -> None:
        self._products_of(matrix).add_to(residual, x_TX, matrix, rows)

    def _products_of(self, matrix: Any) -> TritonProducts[Any]:
        """RuntimeError if the library's product is not ours, which is compared at the first product of each scheme and shape."""
        if isinstance(matrix, Grouped):
            return self._ours
        library = self.library_of(matrix)
        if (expected := self._expected[matrix.key]) is not None:
            self._expected[matrix.key] = None
            x_TX, ours_TN = expected
            for count, rows in ((1, RowClass.SINGLE), (NUM_CHECKED, RowClass.FEW)):
                difference = (library.product(x_TX[:count], matrix, rows, None) - ours_TN[:count]).float()
                if difference.norm() > MAX_DIFFERENCE * ours_TN[:count].float().norm():
                    raise RuntimeError(
                        f"humming-kernels and our kernels differ in {matrix.scheme} of {tuple(matrix.shape)}, {count} tokens: uninstall it"
                    )
        return library

    def library_of(self, matrix: HummingMatrix) -> HummingMatrices:
        return self._library


def has_humming() -> bool:
    return importlib.util.find_spec("humming") is not None


def grouped_products() -> TritonGrouped:
    """The fastest that is installed."""
    return HummingProducts() if has_humming() else TritonGrouped()
