"""Cases of a mixture of experts: the router, and the products with the experts that it chooses."""

from collections.abc import Iterator

import torch

from bench.kernels.timing import Case
from models.config.types import TextConfig
from models.kernels.backend import Backend
from models.kernels.ops import Experts
from models.kernels.stream import Residual, RowClass
from models.weights.matrix import Matrix

EPS = 1e-6
BF16 = 2


def expert_cases(text: TextConfig, backend: Backend, num_tokens: int) -> Iterator[Case]:
    """Return cases of norm, router and experts with their residual sums, in bfloat16 and in float8, which tensor cores multiply twice as
    fast. Tokens and router are random; bytes count the chosen experts. Empty without experts."""
    if text.moe is None:
        return
    hidden, inner, moe, device = text.hidden_size, text.moe.intermediate_size, text.moe, backend.device
    count, chosen = moe.num_experts + moe.has_shared, (moe.num_experts, moe.num_experts_per_tok, moe.has_shared)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), dtype=torch.bfloat16, device=device).mul_(columns**-0.5)

    norm, stream, router = torch.ones(hidden, dtype=torch.bfloat16, device=device), normal(num_tokens, hidden), normal(count, hidden)
    gate_up, down = normal(count * 2 * inner, hidden), normal(count * hidden, inner)
    touched = len((stream @ router[: moe.num_experts].t()).topk(moe.num_experts_per_tok).indices.unique()) + moe.has_shared
    flops = 6.0 * num_tokens * (moe.num_experts_per_tok + moe.has_shared) * hidden * inner
    num_bytes = 3.0 * touched * hidden * inner * BF16
    shape = f"{num_tokens} x {hidden}, {touched} of {count} x {inner}"

    def call(experts: Experts) -> None:
        residual = Residual(stream)
        backend.ops.add_experts_(residual, residual.normed(norm, EPS), experts, RowClass.of(num_tokens), None)

    def case(name: str, experts: Experts, share: float) -> Case:
        return Case(name, shape, flops * share, num_bytes * share + router.nbytes, [lambda: call(experts)])

    def experts(format: str) -> Experts:
        up, out = (Matrix.of(matrix, backend.name, format) for matrix in (gate_up, down))
        return Experts(router, up, out, 0, count, *chosen)

    yield case("norm, router, experts", experts("plain"), 1)
    yield case("float8: norm, router, experts", experts("float8"), 0.5)
