"""Products of low-bit integers by the library humming-kernels, which compiles kernels for each shape when it first meets it."""

import importlib.util
import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

from models.config.schemes import Scheme
from models.kernels.ops import Experts
from models.kernels.stream import Activation, RowClass
from models.kernels.triton.activations import values_of
from models.kernels.triton.moe import Room, weighted_sum
from models.kernels.triton.products import TritonProducts, triton_products
from models.kernels.triton.routing import SortedChoices, route, sort
from models.kernels.triton.text import swiglu
from models.weights.layouts import codes_of, packed_columns, packed_rows
from models.weights.low_bit import STRIPE, LowBit
from models.weights.matrix import Stored

ROWS, COLUMNS = 64, 128  # multiples of its tiles; the library pads rows
WHOLE_ROWS = 8  # multiple of rows that it writes
TOKENS = (8, 16, 32, 64, 128, 256, 512, 2048)  # each with the kernel that the library takes for so many; it has 34 for a shape
SLOTS = (64, 512, 1024, 2048, 4096, 8192, 16_384, 65_536)  # choices of experts, the same
EVERY = 1 << 30

_compilers = ThreadPoolExecutor(8, "humming")


class Kernel(NamedTuple):
    """A kernel for so many choices of experts at most, whose blocks have `rows` of them; or the table of all kernels of a single matrix."""

    num_slots: int
    rows: int
    table: torch.Tensor


@cache
def _compiling(config: Any, device: torch.device, is_indexed: bool) -> "tuple[Future[Kernel], ...]":
    """Compile the kernels of equal matrices in the background."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    def compiled(num_slots: int, rows: int, options: dict[str, str], ranges: list[list[Any]]) -> Kernel:
        with torch.cuda.device(device):
            table = HummingKernel.prepare_kernels(config.to_str(), json.dumps(options) if options else None, ranges, device)
        return Kernel(num_slots, rows, table)

    options = {"gemm_type": "indexed"} if is_indexed else {}
    sizes = SLOTS if is_indexed else TOKENS
    found = [get_heuristics_config(config, shape_m=size, device=device, **options) for size in sizes]
    if is_indexed:  # without stream-K, with which rounding would depend on a choice's block: on the order of atomics
        found = [each | {"use_stream_k": False} for each in found]
    last = [i for i, each in enumerate(found) if i + 1 == len(found) or each != found[i + 1]]  # some are chosen for several numbers
    if is_indexed:
        return tuple(_compilers.submit(compiled, sizes[i], found[i]["block_shape"][0], options, [[0, EVERY, found[i]]]) for i in last)
    ends = [0, *(sizes[i] for i in last[:-1]), EVERY]
    return (_compilers.submit(compiled, EVERY, 0, options, [[ends[n], ends[n + 1], found[i]] for n, i in enumerate(last)]),)


@dataclass(frozen=True)
class HummingMatrix:
    """A matrix (N, K) as humming's kernels read it, or `count` stacked ones: `layer` is its HummingLayer, with `weight`, `weight_scale` and
    `zero_point`. The rows of a single one are padded to a multiple of ROWS; products are not."""

    scheme: Scheme
    layer: Any
    shape: torch.Size
    count: int

    @property
    def stored(self) -> tuple[Stored, ...]:
        """All tensors, none of which a checkpoint has."""
        tensors = self.layer.state_dict().items()
        if not tensors:
            raise ValueError("this version of humming-kernels does not name its tensors: weights cannot be replaced in place")
        return tuple(Stored(name, tensor) for name, tensor in tensors)

    @classmethod
    def of(cls, matrix: LowBit, count: int) -> "HummingMatrix":
        from humming.layer import HummingLayer

        scheme, dtype = matrix.scheme, torch.bfloat16
        kind = {"dtype": f"uint{scheme.bits}", "group_size": scheme.group, "has_zero_point": matrix.zeros is not None}
        rows, columns = matrix.shape
        experts = {"num_experts": count} if count > 1 else {}
        with matrix.codes.device:
            layer = HummingLayer(
                shape_n=rows // count, shape_k=columns, weight_config=kind, pad_n_to_multiple=ROWS, torch_dtype=dtype, **experts
            )
        stripes = (packed_columns(codes_of(stripe, scheme, matrix.layout), scheme.bits) for stripe in matrix.codes.split(STRIPE))
        tensors = {"weight": torch.cat(list(stripes)), "weight_scale": matrix.scales.to(dtype)}
        if matrix.zeros is not None:
            tensors["zero_point"] = packed_rows(matrix.zeros, scheme.bits)
        layer.load_from_tensors({name: tensor.unflatten(0, (count, -1)) if experts else tensor for name, tensor in tensors.items()})
        layer.transform()
        return cls(scheme, layer, matrix.shape, count)

    @property
    def zeros(self) -> torch.Tensor | None:
        zeros: torch.Tensor | None = self.layer.zero_point if self.scheme.has_zeros else None
        return zeros


class Humming(TritonProducts[HummingMatrix]):
    """See `TritonProducts`. Experts are multiplied by the library's indexed kernels."""

    has_gemv = False

    def __init__(self, matrix: HummingMatrix, count: int = 1) -> None:
        super().__init__(matrix, count)
        self._compiling = _compiling(matrix.layer.humming_config, matrix.layer.weight.device, count > 1)

    @cached_property
    def _kernels(self) -> list[Kernel]:
        """Wait for all kernels at the first product: a graph's capture may not be interrupted."""
        return [kernel.result() for kernel in self._compiling]

    def product_of_many(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        return self._launch(self._kernels[0], values_of(x_TX), out_TN)

    def product_f32(self, x_TX: torch.Tensor, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        product = self.product(x_TX, rows)
        return product.float() if out_TN is None else out_TN.copy_(product)

    def sparse_swiglu(
        self, x_TD: torch.Tensor, logits_TE: torch.Tensor, experts: Experts, valid_T: torch.Tensor | None, room: Room | None = None
    ) -> torch.Tensor:
        choices, down = route(logits_TE, experts, valid_T, counted=True), triton_products(experts.down)
        assert isinstance(down, Humming)
        num_slots = choices.experts_TK.numel()
        kernel, kernel_down = self._kernel_for(num_slots), down._kernel_for(num_slots)
        blocks = sort(choices, kernel.rows, is_filled=True)
        inner_SI = swiglu(self._of_choices(kernel, x_TD, blocks, experts.num_given))
        if kernel_down.rows != blocks.rows:
            blocks = sort(choices, kernel_down.rows, is_filled=True)
        sum_TD = (room or x_TD.new_empty)(*x_TD.shape)
        weighted_sum(down._of_choices(kernel_down, inner_SI, blocks, 1), choices.experts_TK, choices.weights_TK, sum_TD, adds=False)
        return sum_TD[None]

    def _kernel_for(self, num_slots: int) -> Kernel:
        return next((kernel for kernel in self._kernels if num_slots <= kernel.num_slots), self._kernels[-1])

    def _of_choices(self, kernel: Kernel, x: torch.Tensor, blocks: SortedChoices, per_input: int) -> torch.Tensor:
        """Return (S, N), the products of the choices, undefined at a choice of -1. `per_input` choices share each row of x."""
        lists = {"sorted_ids": blocks.slots, "expert_ids": blocks.experts_B, "num_tokens_padded": blocks.end_1}
        return self._launch(kernel, x, x.new_empty((len(x) * per_input, self.width // self.count)), **lists, top_k=per_input)

    def _launch(self, kernel: Kernel, x: torch.Tensor, out: torch.Tensor | None, **choices: Any) -> torch.Tensor:
        from humming.ops import launch_kernel

        layer = self.matrix.layer
        scales = {"weight_scale": layer.weight_scale, "zero_point": self.matrix.zeros}
        product: torch.Tensor = launch_kernel(
            configs=kernel.table, inputs=x, weight=layer.weight, **scales, outputs=out, locks=layer.locks, **choices
        )
        return product


def converted(matrix: LowBit, count: int) -> HummingMatrix | None:
    """Return the matrix in the library's form; None if it is not installed or does not multiply such a matrix. RuntimeError if it cannot
    compile."""
    rows, columns = matrix.shape
    whole = WHOLE_ROWS if count == 1 else 2 * COLUMNS  # of experts: gates and up projections of as many values as `down` has columns
    fits = matrix.scheme.element.startswith("int") and rows // count % whole == 0 and columns % COLUMNS == 0 and matrix.codes.is_cuda
    return HummingMatrix.of(matrix, count) if fits and importlib.util.find_spec("humming") is not None else None
