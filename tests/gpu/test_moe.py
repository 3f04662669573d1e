"""The experts' kernels at the sizes of 30B-A3B on one GPU, bfloat16 and float8, against plain torch from the same choices on."""

from dataclasses import replace

import pytest
import torch

from models.kernels.backend import Backend
from models.kernels.ops import Experts
from models.kernels.reference.moe import sparse_swiglu as torch_sparse_swiglu
from models.kernels.reference.ops import TorchOps
from models.kernels.stream import Residual, RowClass
from models.weights.matrix import Matrix

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

DEVICE = torch.device("cuda")


def median(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(((ours.float() - theirs.float()).norm(dim=1) / theirs.float().norm(dim=1)).median())


def make_experts(backend: str, is_float8: bool, width: int = 2048, inner: int = 768, has_shared: bool = False) -> Experts:
    """As those of a layer of 30B-A3B, or with one that all tokens share."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator, dtype=torch.bfloat16, device=DEVICE) * columns**-0.5

    count, chosen = 128 + has_shared, (128, 8, has_shared)
    router, gate_up, down = normal(128 + 16 * has_shared, width), normal(count * 2 * inner, width), normal(count * width, inner)
    matrices = [Matrix.of(matrix, backend, "float8" if is_float8 else "plain", count) for matrix in (gate_up, down)]
    return Experts(router, *matrices, 0, count, *chosen)


@pytest.mark.parametrize("is_float8", [False, True])
@pytest.mark.parametrize(
    ("width", "inner", "has_shared"), [(2048, 768, False), (2048, 384, False), (4096, 1536, False), (4096, 384, False), (2048, 512, True)]
)
@pytest.mark.parametrize("num_tokens", [1, 4, 40])
def test_few_tokens_equal_the_reference(
    backend: Backend, num_tokens: int, width: int, inner: int, has_shared: bool, is_float8: bool
) -> None:
    experts, generator = make_experts(backend.name, is_float8, width, inner, has_shared), torch.Generator(DEVICE).manual_seed(0)
    ops, norm, rows = backend.ops, torch.ones(width, dtype=torch.bfloat16, device=DEVICE), RowClass.of(num_tokens)
    for turn in range(8):
        x, stream = torch.randn((2, num_tokens, width), generator=generator, dtype=torch.bfloat16, device=DEVICE)
        mine = replace(experts, first=8 * turn)  # some of the chosen ones are another rank's, but in the first turn
        normed, added = Residual(x).normed(norm, 1e-6), Residual(stream.clone())
        expected = torch_sparse_swiglu(TorchOps().norm(normed), mine, None).sum(0)
        found, again = (ops.sparse_swiglu(normed, mine, rows, None).sum(0) for _ in range(2))
        assert found.equal(again) and median(found, expected) < (4e-2 if is_float8 else 1e-2)
        ops.add_experts_(added, normed, mine, rows, None)
        ops.norm(added.normed(norm, 1e-6))
        assert median(added.sum_TD, stream.float() + found.float()) < 5e-3
