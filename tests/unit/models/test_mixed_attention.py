"""Attention whose plan lies in memory that somebody else fills, as a graph's does, with torch in place of the CUDA kernels.

Red when the two kernels of a mixed step disagree about whose pages are where, when the size of a plan depends on more than the shape, or
when a backend reads anything of an earlier plan.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.worker.staging import Staging
from models.batch import AttentionLayout
from models.layers.attention import FixedAttention
from tests.unit.models.attention_step import Step
from tests.unit.models.interpreter import interpreted, run_interpreted, starts_interpreter

CPU = torch.device("cpu")
HEADS = (4, 2)
TOKENS = [[70, 13, 0, 1, 1, 1], [0, 1, 82, 1, 1, 1], [83, 0, 0, 1, 1, 1], [70, 13, 0, 1, 1, 1]]  # three prompts, three decode rows
LENGTHS = [[300, 90, 0, 200, 17, 1], [0, 500, 82, 1, 1, 30], [83, 0, 0, 400, 400, 400], [70, 13, 0, 1, 1, 700]]


@starts_interpreter
def test_plans_in_memory_of_others() -> None:
    """In a process of its own, so that no other test meets the kernels of this one."""
    run_interpreted(__file__)


class SplitKernel:
    """What `split_attention.cu` does, unit by unit."""

    def run(self, q, k, v, out, units, pages, partials, sums, arrivals, page_size, scale) -> None:  # type: ignore[no-untyped-def]
        group = q.shape[1] // k.shape[1]
        values, total = torch.zeros(q.shape, dtype=torch.float64), torch.zeros((*q.shape[:2], 1), dtype=torch.float64)
        for first_token, count, offset, start, stop, part, first, parts in units.tolist():
            key, tokens = torch.arange(start, stop), slice(first_token, first_token + count)
            slots = pages[offset + key // page_size].long() * page_size + key % page_size
            keys, cached = (x[slots].repeat_interleave(group, dim=1).double() for x in (k, v))
            hidden = key > stop - count + torch.arange(count)[:, None] if part == first + parts - 1 else torch.zeros(1, len(key)).bool()
            weights = (torch.einsum("thk,shk->hts", q[tokens].double(), keys) * scale).masked_fill(hidden, -torch.inf).exp()
            values[tokens] += torch.einsum("hts,shk->thk", weights, cached)
            total[tokens] += weights.sum(-1).T[:, :, None]
        planned = total[:, 0, 0] > 0
        out[planned] = (values / total)[planned].to(out.dtype)


class PrefillKernel:
    """What `prefill_attention.cu` does, item by item."""

    def tile_rows(self) -> int:
        return 32

    def tile_keys(self) -> int:
        return 32

    def run(self, q, k, v, out, items, pages, page_size, num_blocks, scale) -> None:  # type: ignore[no-untyped-def]
        group = q.shape[1] // k.shape[1]
        for first, count, offset, end, head, *_ in items[1 : 1 + int(items[0, 0])].tolist():
            key, tokens, heads = torch.arange(end), slice(first, first + count), slice(head * group, (head + 1) * group)
            slots = pages[offset + key // page_size].long() * page_size + key % page_size
            hidden = key >= end - count + 1 + torch.arange(count)[:, None]
            scores = torch.einsum("thk,sk->hts", q[tokens, heads].double(), k[slots, head].double()) * scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[tokens, heads] = torch.einsum("hts,sk->thk", weights, v[slots, head].double()).to(out.dtype)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Steps of one shape."""
    kernels = {"split_attention": SplitKernel(), "prefill_attention": PrefillKernel()}
    monkeypatch.setitem(sys.modules, "models.layers.compile_cuda", SimpleNamespace(load_kernel=lambda name, _: kernels[name]))
    built = [Step.build(lengths, HEADS, tokens=tokens, seed=i) for i, (lengths, tokens) in enumerate(zip(LENGTHS, TOKENS, strict=True))]
    return [replace(step.to(CPU, torch.bfloat16), layout=replace(step.layout, num_prefill_rows=3)) for step in built]


def plan_into(memory: Staging, backend: FixedAttention, layout: AttentionLayout) -> tuple[list[torch.Tensor], torch.Tensor]:
    memory.begin()
    plan = [memory.put(array) for array in backend.plan_arrays(layout)]
    pages = memory.rest(torch.int32)
    memory.put(layout.pages.numpy())
    memory.copy()
    return plan, pages


@interpreted
@pytest.mark.parametrize("num_tokens", [83, 0])
def test_a_plan_is_read_where_it_is(steps: list[Step], num_tokens: int) -> None:
    """All steps through one backend that is told once; also decode rows alone. Then through the backend of steps outside graphs."""
    from models.layers.attention_cuda import FixedMixedAttention, make_mixed_attention
    from models.layers.prefill_cuda import PrefillAttention
    from models.layers.split_attention import SplitAttention

    largest = max((step.pool for step in steps), key=lambda pool: len(pool[0]))
    pool = largest[0].clone(), largest[1].clone()
    split = SplitAttention.factory([pool], HEADS[0], 3, max_pages=200)
    backend: FixedAttention = split(3)
    if num_tokens:
        backend = FixedMixedAttention([pool], num_tokens, PrefillAttention([pool], HEADS[0], num_tokens, num_rows=3), split(3))
    memory, eager = Staging(1 << 16, CPU), make_mixed_attention([pool], HEADS[0])
    layouts = [step.layout if num_tokens else step.layout.decode_rows() for step in steps]
    backend.read_from(*plan_into(memory, backend, layouts[0]))
    for step, layout in zip(steps, layouts, strict=True):
        for ours, theirs in zip(pool, step.pool, strict=True):
            ours[: len(theirs)] = theirs
        q, expected = step.q[-3 - num_tokens :], step.expected()[-3 - num_tokens :]
        plan_into(memory, backend, layout)
        torch.testing.assert_close(backend.run(0, q).double(), expected, rtol=1e-2, atol=1e-2)
        eager.plan(layout)
        torch.testing.assert_close(eager.run(0, q).double(), expected, rtol=1e-2, atol=1e-2)
