"""Attention with a fixed plan, with torch in place of the CUDA kernels."""

from dataclasses import replace

import pytest
import torch

from engine.worker.staging import Staging
from models.cache.layout import AttentionLayout
from models.kernels.ops import KVPool
from models.kernels.paged import PagedAttention
from tests.unit.models.backends.hopper.attention_step import Step
from tests.unit.models.backends.hopper.kernels_in_torch import use_torch_kernels

pytest.importorskip("triton")  # beside the kernels that are replaced
from models.kernels.hopper import prefill_attention
from models.kernels.hopper.attention import eager_attention
from models.kernels.hopper.flash_decoding import Split, SplitKernel

CPU = torch.device("cpu")
HEADS = (4, 2)
TOKENS = [[70, 13, 0, 1, 1, 1], [0, 1, 82, 2, 1, 0], [83, 0, 0, 1, 1, 1], [70, 13, 0, 3, 0, 0]]  # three prompts, up to three decode rows
LENGTHS = [[300, 90, 0, 200, 17, 1], [0, 500, 82, 300, 1, 0], [83, 0, 0, 400, 400, 400], [70, 13, 0, 700, 0, 0]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    use_torch_kernels(monkeypatch)
    built = [Step.build(lengths, HEADS, tokens=tokens, seed=i) for i, (lengths, tokens) in enumerate(zip(LENGTHS, TOKENS, strict=True))]
    return [replace(step.to(CPU, torch.bfloat16), layout=replace(step.layout, num_prefill_rows=3)) for step in built]


def plan_into(memory: Staging, backend: PagedAttention, layout: AttentionLayout) -> tuple[list[torch.Tensor], torch.Tensor]:
    memory.begin()
    plan = [memory.put(array) for array in backend.plan_arrays(layout)]
    pages = memory.rest(torch.int32)
    memory.put(layout.pages.numpy())
    memory.copy()
    return plan, pages


def test_a_plan_is_read_where_it_is(steps: list[Step]) -> None:
    largest = max((step.pool for step in steps), key=lambda pool: len(pool[0]))
    pool = largest[0].clone(), largest[1].clone()
    backend = PagedAttention([pool], [Split(SplitKernel([pool], HEADS[0]), 3)], max_pages=200)
    memory, eager = Staging(1 << 16, CPU), eager_attention([pool], HEADS[0])
    layouts = [step.layout.decode_rows() for step in steps]
    backend.read_from(*plan_into(memory, backend, layouts[0]))
    for step, layout in zip(steps, layouts, strict=True):
        for ours, theirs in zip(pool, step.pool, strict=True):
            ours[: len(theirs)] = theirs
        tokens = slice(-3, len(step.q))
        q, expected = step.q[tokens], step.expected()[tokens]
        plan_into(memory, backend, layout)
        torch.testing.assert_close(backend.run(0, q).double(), expected, rtol=1e-2, atol=1e-2)
        eager.plan(layout)
        torch.testing.assert_close(eager.run(0, q).double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("most_pages", [200, 2])
def test_chunks_over_float8_use_a_copy_of_their_pages_if_it_is_large_enough(
    steps: list[Step], most_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []

    def copy_pages(pool: KVPool, copies: KVPool, pages: torch.Tensor) -> None:
        copied.append(pages)
        for source, target in zip(pool, copies, strict=True):
            target[: len(pages)] = source[pages.long()].to(target.dtype)

    pool = steps[0].pool[0].to(torch.float8_e4m3fn), steps[0].pool[1].to(torch.float8_e4m3fn)
    monkeypatch.setattr(prefill_attention, "copy_pages", copy_pages)
    monkeypatch.setattr(prefill_attention, "COPY_BYTES", most_pages * 4 * pool[0][0].numel())
    rounded = replace(steps[0], pool=(pool[0].bfloat16(), pool[1].bfloat16()))
    attention = eager_attention([pool], HEADS[0], portable=eager_attention([rounded.pool], HEADS[0]))
    layout = rounded.layout.prefill_rows()
    attention.plan(layout)
    found = attention.run(0, rounded.q[:83])
    torch.testing.assert_close(found.double(), rounded.expected()[:83], rtol=1e-2, atol=1e-2)
    assert [pages.tolist() for pages in copied] == ([layout.pages.tolist()] if most_pages == 200 else [])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "expected"),
    [(torch.bfloat16, 64, True), (torch.float8_e4m3fn, 128, True), (torch.float8_e4m3fn, 64, False), (torch.float32, 128, False)],
)
def test_other_caches_use_the_portable_attention(dtype: torch.dtype, head_dim: int, expected: bool) -> None:
    pytest.importorskip("triton")
    from models.kernels.hopper.backend import takes

    pool = torch.zeros((1, 16, 8, head_dim), dtype=dtype)
    assert takes([(pool, pool)], 32) is expected
