"""The Triton kernels of Gated DeltaNet in the interpreter against plain torch."""

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch

from models.kernels.ops import DeltaHeads, DeltaState, StateRows
from models.kernels.reference.delta import delta_rule_
from models.kernels.reference.ops import TorchOps
from tests.unit.models.backends.portable.interpreter import in_gate, interpreted

F32 = torch.float32
MIXES = {  # tokens of rows, and how many of these are prompts
    "small": ((17, 1), 1),
    "decode rows": ((1, 1, 1), 0),
    "verify rows": ((3, 1, 0, 2, 8), 0),
    "mixed": ((65, 0, 2, 1, 1), 3),
    "a long chunk": ((130,), 1),
}


def state_of(heads: int, dim: int, conv_CW: torch.Tensor, drafts: int, dtype: torch.dtype) -> DeltaState:
    row = dtype.itemsize * heads * dim * dim + conv_CW.itemsize * ((3 + 2 * drafts) * len(conv_CW) + 2 * drafts * heads) + 64
    accepted = torch.zeros(9, dtype=torch.int64)
    return DeltaState.of(torch.zeros((9, row), dtype=torch.uint8), accepted, (heads, dim, dim), conv_CW, drafts, dtype)


def copy_of(state: DeltaState) -> DeltaState:
    (_, heads, dim, _), (_, drafts, channels) = state.recurrent_RHKV.shape, state.mixed_RDC.shape
    copied = state_of(heads, dim, torch.empty((channels, 4), dtype=state.inputs_RWC.dtype), drafts, state.recurrent_RHKV.dtype)
    for field in fields(state):
        getattr(copied, field.name).copy_(getattr(state, field.name))
    return copied


def inputs(
    counts: tuple[int, ...], num_prefill: int, dtype: torch.dtype, drafts: int = 0, of_state: torch.dtype = F32
) -> tuple[DeltaHeads, DeltaState, StateRows]:
    generator = torch.Generator().manual_seed(sum(counts))
    heads, keys, dim, taps = 4, 2, 16, 4
    channels, total = (2 * keys + heads) * dim, sum(counts)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    conv = normal(channels, taps).to(dtype)
    state = state_of(heads, dim, conv, drafts, of_state)
    state.recurrent_RHKV.copy_(normal(9, heads, dim, dim))
    state.inputs_RWC.copy_(normal(9, taps - 1 + drafts, channels))
    given = DeltaHeads(
        normal(total, channels + heads * dim).to(dtype), normal(total, 2 * heads).to(dtype), conv,
        normal(heads) - 2, normal(heads), 1 + 0.1 * normal(dim).to(dtype), 1e-6, keys, dim,
    )  # fmt: skip
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return given, state, StateRows(torch.randperm(9, generator=generator)[: len(counts)], starts, num_prefill)


@interpreted
@pytest.mark.parametrize("name", [pytest.param(name, marks=in_gate if name == "small" else ()) for name in MIXES])
@pytest.mark.parametrize(("dtype", "of_state", "tolerance"), [(F32, F32, 1e-5), (F32, torch.bfloat16, 0.01), (torch.half, F32, 0.002)])
def test_any_mix(name: str, dtype: torch.dtype, of_state: torch.dtype, tolerance: float) -> None:
    from models.kernels.triton.delta import delta_rule

    heads, state, rows = inputs(*MIXES[name], dtype, 7, of_state)
    copied = copy_of(state)
    expected, ours = delta_rule_(heads, copied, rows), delta_rule(heads, state, rows)
    for got, wanted in ((ours, expected), (state.recurrent_RHKV, copied.recurrent_RHKV), (state.inputs_RWC, copied.inputs_RWC)):
        assert (got.float() - wanted.float()).norm() < tolerance * wanted.float().norm()


STATES = [("torch", F32), ("triton", F32), ("triton", torch.bfloat16)]


@interpreted
@pytest.mark.parametrize(("backend", "of_state"), STATES)
def test_chunks_of_a_prompt_follow_each_other(backend: str, of_state: torch.dtype) -> None:
    from models.kernels.triton.delta import delta_rule

    compute, counts = delta_rule_ if backend == "torch" else delta_rule, (16, 70, 64, 30, 1)
    heads, state, _ = inputs(counts, 4, F32, 0, of_state)
    singly, starts = copy_of(state), torch.tensor([0, *counts]).cumsum(0).int()
    state.recurrent_RHKV[7:], state.inputs_RWC[7:] = 3, 3  # spare rows
    rows, sources, firsts = torch.tensor([7, 8, 2, 5, 0]), torch.tensor([2, 2, 2, 5, 0]), starts[:-1].clone()
    firsts[1:3] = 0
    ours = compute(heads, state, StateRows(rows, starts, 4, (sources, firsts)))
    for i, (row, start, end) in enumerate(zip(sources, starts, starts[1:], strict=False)):
        given = replace(heads, inputs_TX=heads.inputs_TX[start:end], gates_TX=heads.gates_TX[start:end])
        alone = StateRows(row[None], torch.tensor([0, end - start]).int(), int(i < 4))
        torch.testing.assert_close(ours[start:end], compute(given, singly, alone), rtol=0, atol=0)
        assert state.recurrent_RHKV[rows[i]].equal(singly.recurrent_RHKV[row])
        assert state.inputs_RWC[rows[i]].equal(singly.inputs_RWC[row])


@interpreted
@pytest.mark.parametrize(("backend", "of_state"), STATES)
def test_a_refused_draft_leaves_no_trace(backend: str, of_state: torch.dtype) -> None:
    from models.kernels.triton.delta import delta_rule

    compute, tolerance = (delta_rule_, 1e-5) if backend == "torch" else (delta_rule, 0.0)
    accepted = [(0, 7, 2, 1, 4), (5, 0, 7, 3, 1), (0, 0, 0, 0, 0)]  # of so many drafts: the rows' three steps
    counts = [(7, 7, 7, 7, 7), (5, 2, 7, 4, 1), (0, 0, 0, 0, 0)]
    heads, first, rows = inputs(tuple(1 + count for step in counts for count in step), 0, F32, 7, of_state)
    tokens, places = torch.arange(len(heads.inputs_TX)).split(rows.starts_R1.diff().tolist()), rows.rows_R[:5]

    def run(state: DeltaState, runs: Sequence[torch.Tensor], places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index, ends = torch.cat([*runs]), torch.tensor([0, *(len(one) for one in runs)]).cumsum(0).int()
        given = replace(heads, inputs_TX=heads.inputs_TX[index], gates_TX=heads.gates_TX[index])
        return compute(given, state, StateRows(places, ends, 0)).split([len(one) for one in runs])

    state, plain = copy_of(first), copy_of(first)
    for step, held in enumerate(accepted):
        chosen = tokens[5 * step : 5 * step + 5]
        outputs = run(state, chosen, places)
        state.num_accepted_R[places] = torch.tensor(held)
        for r, count in enumerate(held):
            singly = [run(plain, [token[None]], places[r : r + 1])[0] for token in chosen[r][: 1 + count]]
            torch.testing.assert_close(outputs[r][: 1 + count], torch.cat(singly), rtol=0, atol=tolerance)
    torch.testing.assert_close(state.recurrent_RHKV, plain.recurrent_RHKV, rtol=0, atol=tolerance)
    assert state.inputs_RWC[:, :3].equal(plain.inputs_RWC[:, :3])


@interpreted
def test_equal_keys_lose_no_digits() -> None:
    from models.kernels.triton.delta import delta_rule

    heads, state, rows = inputs((64,), 1, F32)
    same = heads.inputs_TX[:1].expand_as(heads.inputs_TX).clone()
    heads = replace(heads, inputs_TX=same, gates_TX=torch.full_like(heads.gates_TX, 9.0), a_log_H=torch.full_like(heads.a_log_H, -20.0))
    copied = copy_of(state)
    expected, ours = delta_rule_(heads, copied, rows), delta_rule(heads, state, rows)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@interpreted(gate=True)
def test_gate() -> None:
    from models.kernels.triton.ops import TritonOps

    ops, gates = TritonOps(), torch.randn(3, 20)
    for count in (1, 10):
        x = torch.randn(3, 130)
        expected = x.clone()
        TorchOps().gate_(expected, gates[:, :count])
        ops.gate_(x, gates[:, :count])
        torch.testing.assert_close(x, expected)
