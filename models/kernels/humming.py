"""Products of low-bit integers by the library humming-kernels, which compiles kernels for each shape when it first meets it."""

import importlib.util
import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from models.config.schemes import Scheme
from models.kernels.ops import Experts
from models.kernels.stream import Activation, Residual, Rounded, RowClass
from models.kernels.triton.activations import values_of
from models.kernels.triton.grouped import TritonGrouped
from models.kernels.triton.products import ExpertGemv, ExpertProducts, TritonProducts
from models.kernels.triton.routing import SortedChoices
from models.weights.grouped import STRIPE, Grouped
from models.weights.layouts import codes_of, packed_columns, packed_rows
from models.weights.matrix import Stored

logger = logging.getLogger(__name__)

ROWS, COLUMNS = 64, 128  # multiples of its tiles; the library pads rows
WHOLE_ROWS = 8  # multiple of rows that it writes
TOKENS = (8, 16, 32, 64, 128, 256, 512, 2048)  # each with the kernel that the library takes for so many; it has 34 for a shape
SLOTS = (64, 512, 1024, 2048, 4096, 8192, 16_384, 65_536)  # choices of experts, the same
EVERY = 1 << 30
NUM_CHECKED, MAX_DIFFERENCE = 3, 0.02  # tokens of the comparison with our kernels, and its relative limit

Key = tuple[Scheme, torch.Size, int]

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


class ExpertKernel(NamedTuple):
    """A kernel for so many choices at most, whose blocks have `rows` of them."""

    num_slots: int
    rows: int
    table: "Future[torch.Tensor]"


@cache
def _expert_kernels(config: Any, device: torch.device) -> tuple[ExpertKernel, ...]:
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    def compiled(chosen: dict[str, Any]) -> torch.Tensor:
        with torch.cuda.device(device):
            return HummingKernel.prepare_kernels(config.to_str(), json.dumps({"gemm_type": "indexed"}), [[0, EVERY, chosen]], device)

    chosen = (get_heuristics_config(config, shape_m=num_slots, gemm_type="indexed", device=device) for num_slots in SLOTS)
    found = [each | {"use_stream_k": False} for each in chosen]  # else rounding would depend on a choice's block: on the order of atomics
    last = {json.dumps(each, sort_keys=True): i for i, each in enumerate(found)}  # some are chosen for several numbers
    return tuple(ExpertKernel(SLOTS[i], found[i]["block_shape"][0], _compilers.submit(compiled, found[i])) for i in sorted(last.values()))


@dataclass(frozen=True)
class HummingMatrix:
    """A matrix (N, K) as humming's kernels read it, or `count` stacked ones: `layer` is its HummingLayer, with `weight`, `weight_scale` and
    `zero_point`. The rows of a single one are padded to a multiple of ROWS; products are not."""

    scheme: Scheme
    layer: Any
    shape: torch.Size
    count: int
    kernels: "Future[torch.Tensor] | None"  # of a single one
    expert_kernels: tuple[ExpertKernel, ...]

    @property
    def stored(self) -> tuple[Stored, ...]:
        """All tensors, none of which a checkpoint has."""
        tensors = self.layer.state_dict().items()
        if not tensors:
            raise ValueError("this version of humming-kernels does not name its tensors: weights cannot be replaced in place")
        return tuple(Stored(name, tensor) for name, tensor in tensors)

    @classmethod
    def of(cls, matrix: Grouped, count: int) -> "HummingMatrix":
        """Its kernels are compiled in the background."""
        from humming.layer import HummingLayer

        scheme, dtype, device = matrix.scheme, torch.bfloat16, matrix.codes.device
        kind = {"dtype": f"uint{scheme.bits}", "group_size": scheme.group, "has_zero_point": matrix.zeros is not None}
        rows, columns = matrix.shape
        experts = {"num_experts": count} if count > 1 else {}
        with device:
            layer = HummingLayer(
                shape_n=rows // count, shape_k=columns, weight_config=kind, pad_n_to_multiple=ROWS, torch_dtype=dtype, **experts
            )
        stripes = (packed_columns(codes_of(stripe, scheme, matrix.layout), scheme.bits) for stripe in matrix.codes.split(STRIPE))
        tensors = {
            "weight": torch.cat(list(stripes)),
            "weight_scale": matrix.scales.to(dtype),
        }
        if matrix.zeros is not None:
            tensors["zero_point"] = packed_rows(matrix.zeros, scheme.bits)
        layer.load_from_tensors({name: tensor.unflatten(0, (count, -1)) if experts else tensor for name, tensor in tensors.items()})
        layer.transform()
        config = layer.humming_config
        single, several = (None, _expert_kernels(config, device)) if experts else (_kernels(config, device), ())
        return cls(scheme, layer, matrix.shape, count, single, several)

    @property
    def key(self) -> Key:
        return self.scheme, self.shape, self.count

    @property
    def zeros(self) -> torch.Tensor | None:
        zeros: torch.Tensor | None = self.layer.zero_point if self.scheme.has_zeros else None
        return zeros

    def product(self, x_TX: torch.Tensor, out_TN: torch.Tensor | None) -> torch.Tensor:
        assert self.kernels is not None
        return self._launch(self.kernels, x_TX, out_TN)

    def kernel_for(self, num_slots: int) -> ExpertKernel:
        return next((kernel for kernel in self.expert_kernels if num_slots <= kernel.num_slots), self.expert_kernels[-1])

    def product_of_choices(self, x: torch.Tensor, blocks: SortedChoices, per_input: int) -> torch.Tensor:
        """See `ExpertProducts.of_choices`."""
        num_slots = len(x) * per_input
        out_SN, kernels = x.new_empty((num_slots, self.shape[0] // self.count)), self.kernel_for(num_slots).table
        lists = {"sorted_ids": blocks.slots, "expert_ids": blocks.experts_B, "num_tokens_padded": blocks.end_1}
        return self._launch(kernels, x, out_SN, **lists, top_k=per_input)

    def product_of_last(self, x_TX: torch.Tensor) -> torch.Tensor:
        """Return the products with the last of several matrices, when all kernels are loaded: a graph's capture may not be interrupted."""
        wait([kernel.table for kernel in self.expert_kernels])
        rows, count = self.kernel_for(len(x_TX)).rows, len(x_TX)
        slots, ints = torch.arange(rows, device=x_TX.device).clamp(max=count), torch.tensor((self.count - 1, count, rows))
        return self.product_of_choices(x_TX, SortedChoices(rows, slots.int(), *ints.int().to(x_TX.device).split(1)), 1)

    def _launch(self, kernels: "Future[torch.Tensor]", x: torch.Tensor, out: torch.Tensor | None, **choices: Any) -> torch.Tensor:
        from humming.ops import launch_kernel

        layer = self.layer
        scales = {"weight_scale": layer.weight_scale, "zero_point": self.zeros}
        product: torch.Tensor = launch_kernel(
            configs=kernels.result(), inputs=x, weight=layer.weight, **scales, outputs=out, locks=layer.locks, **choices
        )
        return product


def takes(matrix: Grouped, count: int) -> bool:
    """Whether humming's kernels multiply it."""
    rows, columns = matrix.shape
    whole = WHOLE_ROWS if count == 1 else 2 * COLUMNS  # of experts: gates and up projections of as many values as `down` has columns
    return matrix.scheme.element.startswith("int") and rows // count % whole == 0 and columns % COLUMNS == 0 and matrix.codes.is_cuda


class HummingExperts:
    """See `ExpertProducts`."""

    @staticmethod
    def rows_of(matrices: HummingMatrix, num_slots: int) -> int:
        return matrices.kernel_for(num_slots).rows

    @staticmethod
    def of_choices(x: torch.Tensor, matrices: HummingMatrix, blocks: SortedChoices, per_input: int) -> torch.Tensor:
        return matrices.product_of_choices(x, blocks, per_input)


class HummingMatrices(TritonProducts[HummingMatrix]):
    """See `TritonProducts`."""

    def product_of_many(self, x_TX: Activation, matrix: HummingMatrix, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        return matrix.product(values_of(x_TX), out_TN)

    def product_f32(self, x_TX: torch.Tensor, matrix: HummingMatrix, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        product = self.product(x_TX, matrix, rows, None)
        return product.float() if out_TN is None else out_TN.copy_(product)

    def expert_products(self, experts: Experts) -> ExpertProducts:
        return HummingExperts()


class HummingProducts(TritonGrouped):
    """Our kernels multiply matrices of floats, the library the others, unless it cannot compile the first one's kernels."""

    def __init__(self) -> None:
        self._compiles = True
        self._ours, self._library = TritonGrouped(), HummingMatrices()
        self._known: set[Key] = set()
        self._unchecked: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}  # tokens and our product; empty after the first step

    def prepared(self, matrix: Any, count: int) -> Any:
        if not (self._compiles and takes(matrix, count)):
            return matrix
        try:
            made = HummingMatrix.of(matrix, count)
        except (RuntimeError, OSError) as problem:
            if self._known or isinstance(problem, torch.OutOfMemoryError):
                raise
            self._compiles = False
            logger.warning("humming-kernels found no CUDA compiler, so low-bit matrices use slower kernels: %s", problem)
            return matrix
        if made.key not in self._known:
            self._known.add(made.key)
            rows, columns = matrix.shape
            x_TX = torch.randn((NUM_CHECKED, columns), device=matrix.codes.device).to(torch.bfloat16)
            self._unchecked[made.key] = x_TX, self._ours.product(x_TX, matrix.rows(rows - rows // count, rows), RowClass.FEW, None)
        return made

    def expert_gemv(self, experts: Experts) -> ExpertGemv | None:
        return self._products_of_experts(experts).expert_gemv(experts)

    def expert_products(self, experts: Experts) -> ExpertProducts | None:
        return self._products_of_experts(experts).expert_products(experts)

    def product(self, x_TX: Activation, matrix: Any, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        return self._products_of(matrix).product(x_TX, matrix, rows, out_TN)

    def product_f32(self, x_TX: torch.Tensor, matrix: Any, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        return self._products_of(matrix).product_f32(x_TX, matrix, rows, out_TN)

    def swiglu(self, x_TX: Activation, matrix: Any, rows: RowClass) -> torch.Tensor | Rounded:
        return self._products_of(matrix).swiglu(x_TX, matrix, rows)

    def add_to(self, residual: Residual, x_TX: Activation, matrix: Any, rows: RowClass) -> None:
        self._products_of(matrix).add_to(residual, x_TX, matrix, rows)

    def _products_of_experts(self, experts: Experts) -> TritonProducts[Any]:
        gate_up, down = (self._products_of(matrix.storage) for matrix in (experts.gate_up, experts.down))
        if self._ours in (gate_up, down) and gate_up is not down:
            raise ValueError(f"humming-kernels has no kernel for experts of {experts.down.shape[1]} values: uninstall it")
        return gate_up if gate_up is down else self._library

    def _products_of(self, matrix: Any) -> TritonProducts[Any]:
        """RuntimeError if the library's product is not ours, which is compared at the first product of each scheme and shape."""
        if isinstance(matrix, Grouped):
            return self._ours
        library = self.library_of(matrix)
        if self._unchecked and (expected := self._unchecked.pop(matrix.key, None)) is not None:
            x_TX, ours_TN = expected
            for count, rows in ((1, RowClass.SINGLE), (NUM_CHECKED, RowClass.FEW)):
                if matrix.count == 1:
                    product_TN = library.product(x_TX[:count], matrix, rows, None)
                else:
                    product_TN = matrix.product_of_last(x_TX[:count])
                if (product_TN - ours_TN[:count]).float().norm() > MAX_DIFFERENCE * ours_TN[:count].float().norm():
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
