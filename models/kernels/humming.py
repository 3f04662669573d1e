"""Products of low-bit matrices by the library humming-kernels, which compiles kernels for each shape when it first meets it."""

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch

from models.kernels.compiling import THIS_THREAD
from models.kernels.ops import Experts
from models.kernels.stream import Activation, RowClass
from models.kernels.triton.activations import values_of
from models.kernels.triton.moe import Room, weighted_sum
from models.kernels.triton.products import TritonProducts, triton_products
from models.kernels.triton.routing import SortedChoices, route, sort
from models.kernels.triton.text import swiglu
from models.weights.float8 import GroupScaled
from models.weights.low_bit import LowBit
from models.weights.matrix import Stored

TILE = 128  # rows and columns are padded to multiples of it, as some of the library's tiles need
WHOLE = 8  # multiple of rows and columns before that
LOCKS = 2048  # of tiles whose sums several blocks add up, as the library's own layers have
TYPES = {"int4": "uint4", "int8": "uint8", "float4": "float4e2m1", "float8": "float8e4m3"}  # by element
TOKENS = (8, 16, 32, 64, 128, 256, 512, 2048)  # each with the kernel that the library takes for so many; it has 34 for a shape
CHOICES = (8, 64, 512, 1024, 2048, 4096, 8192, 16_384, 65_536)  # choices of experts, the same
EVERY = 1 << 30

_compilers = ThreadPoolExecutor(8, "humming")


class Kernel(NamedTuple):
    """A kernel for so many choices of experts at most, whose blocks have `rows` of them; or the table of all kernels of a single matrix."""

    num_choices: int
    rows: int
    table: torch.Tensor


@cache
def _compiling(config: Any, device: torch.device, is_indexed: bool, sizes: tuple[int, ...]) -> "tuple[Future[Kernel], ...]":
    """Compile the kernels of equal matrices in the background."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    def compiled(num_choices: int, rows: int, options: dict[str, str], ranges: list[list[Any]]) -> Kernel:
        return Kernel(num_choices, rows, HummingKernel.prepare_kernels(config.to_str(), json.dumps(options), ranges, device))

    options = {"gemm_type": "indexed"} if is_indexed else {}
    found = [get_heuristics_config(config, shape_m=size, device=device, **options) for size in sizes]
    if is_indexed:  # stream-K only if an expert has one block: rounding would depend on a choice's block, on the order of atomics
        can = [size <= each["block_shape"][0] for size, each in zip(sizes, found, strict=True)]
        found = [each | {"use_stream_k": each["use_stream_k"] and is_one} for each, is_one in zip(found, can, strict=True)]
    last = [i for i, each in enumerate(found) if i + 1 == len(found) or each != found[i + 1]]  # some are chosen for several numbers
    if is_indexed:
        return tuple(_compilers.submit(compiled, sizes[i], found[i]["block_shape"][0], options, [[0, EVERY, found[i]]]) for i in last)
    ends = [0, *(sizes[i] for i in last[:-1]), EVERY]
    return (_compilers.submit(compiled, EVERY, 0, options, [[ends[n], ends[n + 1], found[i]] for n, i in enumerate(last)]),)


@dataclass(frozen=True)
class HummingMatrix:
    """A matrix (N, K), or stacked ones, as humming's kernels read it: `tensors` are arguments of its launches by name, `config` is
    the library's description. Rows and columns are padded to a multiple of TILE; inputs and products are not."""

    config: Any
    tensors: dict[str, torch.Tensor]
    shape: torch.Size

    @property
    def stored(self) -> tuple[Stored, ...]:
        """All tensors, none of which a checkpoint has."""
        return tuple(Stored(name, tensor) for name, tensor in self.tensors.items())

    @classmethod
    def of(cls, matrix: LowBit, count: int) -> "HummingMatrix":
        """ValueError if the library does not multiply such a matrix, RuntimeError if it cannot compile."""
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors

        (rows, columns), scheme = matrix.shape, matrix.scheme
        if rows // count % WHOLE or columns % WHOLE:
            raise ValueError(f"{scheme} needs multiples of {WHOLE} rows and columns on every GPU, got {rows // count} x {columns} (--tp)")
        schema = HummingWeightSchema(
            b_dtype=TYPES[scheme.element], weight_scale_group_size=scheme.group, has_zero_point=matrix.zeros is not None
        )
        config, tensors = prepare_and_transform_humming_tensors(
            library_tensors(matrix, count), rows // count, columns, schema, num_experts=count if count > 1 else None,
            pad_n_to_multiple=TILE, pad_k_to_multiple=TILE, torch_dtype=torch.bfloat16, device=matrix.codes.device,
        )  # fmt: skip
        return cls(config, tensors, matrix.shape)


def library_tensors(matrix: LowBit, count: int) -> dict[str, torch.Tensor]:
    """Return the tensors of `count` stacked matrices by the library's names, before it moves values. Scales are in bfloat16: float8 and a
    factor are slower."""
    scales = matrix.scales if matrix.factors is None else matrix.scales.float() * matrix.factors
    tensors = {"weight": matrix.codes, "weight_scale": scales.to(torch.bfloat16)}
    if matrix.zeros is not None:
        tensors["zero_point"] = matrix.zeros
    return {name: tensor.unflatten(0, (count, -1)) if count > 1 else tensor for name, tensor in tensors.items()}


class Humming(TritonProducts[Any]):
    """See `TritonProducts`. `finished` converts the LowBit matrix to a HummingMatrix; before, there are no products. Experts are multiplied
    by the library's indexed kernels."""

    has_gemv = False

    def finished(self) -> "Humming":
        from humming.ops import launch_kernel

        self.matrix = HummingMatrix.of(self.matrix, self.count)
        device, sizes = self.matrix.tensors["weight"].device, CHOICES[self.has_gemv :] if self.count > 1 else TOKENS
        self._compiling = _compiling(self.matrix.config, device, self.count > 1, sizes)
        locks = torch.zeros(LOCKS, dtype=torch.int32, device=device)
        self._launch: Callable[..., torch.Tensor] = partial(launch_kernel, **self.matrix.tensors, locks=locks)
        return self

    @cached_property
    def _kernels(self) -> list[Kernel]:
        """Wait for all kernels at the first product: a graph's capture may not be interrupted."""
        return [kernel.result() for kernel in self._compiling]

    def product_of_many(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        return self._launch(configs=self._kernels[0].table, inputs=values_of(x_TX), outputs=out_TN)

    def product_f32(self, x_TX: torch.Tensor, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        product = self.product(x_TX, rows)
        return product.float() if out_TN is None else out_TN.copy_(product)

    def sparse_swiglu(
        self, x_TD: torch.Tensor | GroupScaled, logits_STE: torch.Tensor, counts_E: torch.Tensor, experts: Experts,
        valid_T: torch.Tensor | None, room: Room,
    ) -> torch.Tensor:  # fmt: skip
        choices, down = route(logits_STE, experts, valid_T, counts_E=counts_E), triton_products(experts.down)
        assert isinstance(down, Humming) and isinstance(x_TD, torch.Tensor)
        num_choices = choices.experts_TK.numel()
        kernel, kernel_down = self._kernel_for(num_choices), down._kernel_for(num_choices)
        blocks = sort(choices, kernel.rows, is_filled=True)
        inner_SI = swiglu(self._of_choices(kernel, x_TD, blocks, experts.num_given))
        if kernel_down.rows != blocks.rows:
            blocks = sort(choices, kernel_down.rows, is_filled=True)
        sum_1TD = room(1, *x_TD.shape)
        weighted_sum(down._of_choices(kernel_down, inner_SI, blocks, 1), choices.experts_TK, choices.weights_TK, sum_1TD[0], adds=False)
        return sum_1TD

    def _kernel_for(self, num_choices: int) -> Kernel:
        return next((kernel for kernel in self._kernels if num_choices <= kernel.num_choices), self._kernels[-1])

    def _of_choices(self, kernel: Kernel, x: torch.Tensor, blocks: SortedChoices, per_input: int) -> torch.Tensor:
        """Return (S, N), the products of the choices, undefined at a choice of -1. `per_input` choices share each row of x."""
        out_SN = x.new_empty((len(x) * per_input, self.width // self.count))
        if THIS_THREAD.compiler is None:  # otherwise no kernel has written the blocks
            self._launch(
                configs=kernel.table, inputs=x, outputs=out_SN, top_k=per_input, sorted_ids=blocks.choices,
                expert_ids=blocks.experts_B, num_tokens_padded=blocks.end_1,
            )  # fmt: skip
        return out_SN
