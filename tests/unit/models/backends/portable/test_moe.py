"""The experts' Triton kernels in Triton's interpreter against plain torch."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from models.kernels.ops import Experts
from models.kernels.reference.moe import sparse_swiglu as torch_sparse_swiglu
from models.kernels.reference.ops import TorchOps
from models.kernels.stream import Residual, RowClass
from models.weights.float8 import GroupScaled
from models.weights.matrix import Matrix
from tests.unit.models.backends.portable.interpreter import in_gate, interpreted

NUM_EXPERTS, CHOSEN = 8, 2
MANY = 12  # tokens; more are sorted


@pytest.fixture
def _few_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    from models.kernels.triton import moe, routing

    for module in (moe, routing):
        monkeypatch.setattr(module, "MOST_LISTED", MANY)


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds what must not be read: NaN, or choices and tiles that there are not."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        made: torch.Tensor = new_empty(self, *args, **options)  # type: ignore[call-overload]
        return made.fill_(torch.nan if made.is_floating_point() and made.itemsize > 1 else 100)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def make_experts(width: int, inner: int, is_float8: bool = False, has_shared: bool = False) -> Experts:
    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) * columns**-0.5

    count = NUM_EXPERTS + has_shared
    router, gate_up, down = normal(NUM_EXPERTS + 8 * has_shared, width), normal(count * 2 * inner, width), normal(count * width, inner)
    matrices = [Matrix.of(matrix, "portable", "float8" if is_float8 else "plain", count) for matrix in (gate_up, down)]
    return Experts(router, *matrices, 0, count, NUM_EXPERTS, CHOSEN, has_shared)


def ours(x_TD: torch.Tensor, experts: Experts, valid_T: torch.Tensor | None) -> torch.Tensor:
    from models.kernels.triton.products import triton_products

    logits_1TE = x_TD[None] @ experts.router_ED.t()
    counts = torch.zeros(experts.count, dtype=torch.int32)
    return triton_products(experts.gate_up).sparse_swiglu(x_TD, logits_1TE, counts, experts, valid_T, x_TD.new_empty)


def evenly(x_TD: torch.Tensor, experts: Experts) -> None:
    """Whatever comes."""


def to_one(x_TD: torch.Tensor, experts: Experts) -> None:
    x_TD[:, 0] = 9
    experts.router_ED[3, 0], experts.router_ED[5, 0] = 50, 10


Skew = Callable[[torch.Tensor, Experts], None]


@interpreted
@pytest.mark.usefixtures("_few_is_little", "_poisoned")
@pytest.mark.parametrize(
    ("num_tokens", "skew", "is_padded", "has_shared"),  # all pairs of values
    [
        (1, evenly, False, False), (1, to_one, True, True), (3, evenly, True, False), (3, to_one, False, True),
        pytest.param(12, evenly, False, True, marks=in_gate), (12, to_one, True, False),
        pytest.param(13, evenly, True, True, marks=in_gate), (13, to_one, False, False),
        (70, evenly, False, False), (70, to_one, True, True),
    ],
)  # fmt: skip
def test_parts_equal_the_reference(num_tokens: int, skew: Skew, is_padded: bool, has_shared: bool) -> None:
    torch.manual_seed(num_tokens)
    x, experts = torch.randn(num_tokens, 64), make_experts(64, 48, has_shared=has_shared)
    skew(x, experts)
    real = torch.arange(num_tokens) % 3 != 1 if is_padded else None
    if real is not None:
        x[~real] = torch.nan
    found, expected = ours(x, experts, real), torch_sparse_swiglu(x.nan_to_num(0), experts, real)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(
    ("width", "inner", "chosen", "has_shared"),
    [pytest.param(64, 48, 2, True, marks=in_gate), (96, 80, 3, False), (96, 80, 2, True)],
)
def test_a_single_token(width: int, inner: int, chosen: int, has_shared: bool) -> None:
    from models.kernels.triton.ops import TritonOps

    torch.manual_seed(width)
    whole, ops, stream = make_experts(width, inner, has_shared=has_shared), TritonOps(), torch.randn(1, width)
    whole = replace(whole, num_chosen=chosen)
    x = Residual(torch.randn(1, width)).normed(torch.rand(width), 1e-6)
    expected = torch_sparse_swiglu(TorchOps().norm(x), whole, None).sum(0)

    def added(experts: Experts, real: torch.Tensor | None = None) -> torch.Tensor:
        found = Residual(stream.clone())
        ops.add_experts_(found, x, experts, RowClass.SINGLE, real)
        assert found.parts_STD is None
        return found.sum_TD - stream

    torch.testing.assert_close(ops.sparse_swiglu(x, whole, RowClass.SINGLE, None), expected[None], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(added(whole, torch.ones(1, dtype=torch.bool)), expected, rtol=1e-4, atol=1e-4)
    assert not added(whole, torch.zeros(1, dtype=torch.bool)).any()
    shares = []
    for first, count in ((0, 3), (3, 5 + has_shared)):
        end = first + count
        gate_up, down = (
            Matrix.of(matrix.storage.values[first * rows : end * rows], "portable", count=count)
            for matrix, rows in ((whole.gate_up, 2 * inner), (whole.down, width))
        )
        shares.append(added(replace(whole, gate_up=gate_up, down=down, first=first, count=count)))
    torch.testing.assert_close(shares[0] + shares[1], expected, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.usefixtures("_few_is_little", "_poisoned")
@pytest.mark.parametrize(("num_tokens", "has_shared"), [(1, False), pytest.param(5, True, marks=in_gate), (40, True)])
def test_float8(num_tokens: int, has_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from models.kernels.triton import activations

    monkeypatch.setattr(activations, "quantized", lambda x, _: GroupScaled.quantized(x))  # the interpreter loses a carry
    torch.manual_seed(num_tokens)
    experts = make_experts(256, 128, True, has_shared)
    x = torch.randn(num_tokens, 256) * torch.logspace(-2, 2, 256)
    for matrix in (experts.gate_up, experts.down):
        matrix.storage.scales.mul_(torch.rand_like(matrix.storage.scales) + 0.5)
    found, expected = ours(x, experts, None), torch_sparse_swiglu(x, experts, None)
    assert float((found - expected).norm() / expected.norm()) < 1e-2  # what lies between two float8 values may go either way
