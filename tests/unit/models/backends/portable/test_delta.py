"""The Triton kernels of Gated DeltaNet in the interpreter against plain torch."""

from dataclasses import replace

import pytest
import torch

from models.backends.ops import DeltaHeads, DeltaState, StateRows
from models.backends.torch.delta import delta_rule_
from models.backends.torch.ops import TorchOps
from models.layers.fp8 import GroupScaled
from tests.unit.models.backends.portable.interpreter import interpreted, run_interpreted, starts_interpreter

MIXES = {  # tokens of rows, and how many of these are prompts
    "decode rows": ((1, 1, 1), 0),
    "verify rows": ((3, 1, 0, 2), 0),
    "mixed": ((65, 0, 2, 1, 1), 3),
    "a long chunk": ((130,), 1),
}


@starts_interpreter
def test_delta_in_the_interpreter(interpreted_files: list[str]) -> None:
    run_interpreted(interpreted_files)


def inputs(counts: tuple[int, ...], num_prefill: int, dtype: torch.dtype) -> tuple[DeltaHeads, DeltaState, StateRows]:
    """Two key heads for six value heads of 16; states lie between others' bytes, in rows of any order."""
    generator = torch.Generator().manual_seed(sum(counts))
    heads, keys, dim, taps = 6, 2, 16, 4
    channels, total = (2 * keys + heads) * dim, sum(counts)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    size = 4 * heads * dim * dim
    stored = torch.zeros((9, size + (taps - 1) * channels * dtype.itemsize), dtype=torch.uint8)
    recurrent = stored[:, :size].view(torch.float32).unflatten(1, (heads, dim, dim))
    last = stored[:, size:].view(dtype).unflatten(1, (taps - 1, channels))
    recurrent.copy_(normal(9, heads, dim, dim))
    last.copy_(normal(9, taps - 1, channels))
    given = DeltaHeads(
        normal(total, channels + heads * dim).to(dtype), normal(total, 2 * heads).to(dtype), normal(channels, taps).to(dtype),
        normal(heads) - 2, normal(heads), 1 + 0.1 * normal(dim).to(dtype), 1e-6, keys, dim,
    )  # fmt: skip
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return given, DeltaState(recurrent, last), StateRows(torch.randperm(9, generator=generator)[: len(counts)], starts, num_prefill)


@interpreted
@pytest.mark.parametrize("name", MIXES)
def test_any_mix(name: str) -> None:
    """Red if a row reads another one's tokens or state, a chunk's edge is missed, or a head has the keys of another group."""
    from models.backends.portable.delta import delta_rule

    heads, state, rows = inputs(*MIXES[name], torch.float32)
    copied = DeltaState(state.recurrent_RHKV.clone(), state.inputs_RWC.clone())
    expected, ours = delta_rule_(heads, copied, rows), delta_rule(heads, state, rows)
    for got, wanted in ((ours, expected), (state.recurrent_RHKV, copied.recurrent_RHKV), (state.inputs_RWC, copied.inputs_RWC)):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@interpreted
def test_equal_keys_lose_no_digits() -> None:
    """Red if the system is solved by powers: without decay, and with the same token again and again, these grow beyond float32."""
    from models.backends.portable.delta import delta_rule

    heads, state, rows = inputs((64,), 1, torch.float32)
    same = heads.inputs_TX[:1].expand_as(heads.inputs_TX).clone()
    heads = replace(heads, inputs_TX=same, gates_TX=torch.full_like(heads.gates_TX, 9.0), a_log_H=torch.full_like(heads.a_log_H, -20.0))
    copied = DeltaState(state.recurrent_RHKV.clone(), state.inputs_RWC.clone())
    expected, ours = delta_rule_(heads, copied, rows), delta_rule(heads, state, rows)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@interpreted
def test_half_precision() -> None:
    """Red if sums or states are rounded, not only the operands of products. In float16: the interpreter multiplies no bfloat16."""
    from models.backends.portable.delta import delta_rule

    heads, state, rows = inputs((70, 5, 1), 2, torch.float16)
    copied = DeltaState(state.recurrent_RHKV.clone(), state.inputs_RWC.clone())
    expected, ours = delta_rule_(heads, copied, rows), delta_rule(heads, state, rows)
    for got, wanted in ((ours, expected), (state.recurrent_RHKV, copied.recurrent_RHKV)):
        assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < 2e-3
    assert torch.equal(state.inputs_RWC, copied.inputs_RWC)


@interpreted
def test_gate() -> None:
    """Red if a gate is another head's, or a token's scales miss it."""
    from models.backends.portable.ops import TritonOps

    ops, gates = TritonOps(1), torch.randn(3, 20)
    for count in (1, 10):
        x = torch.randn(3, 130)
        expected = x.clone()
        TorchOps().gate_(expected, gates[:, :count])
        ops.gate_(x, gates[:, :count])
        torch.testing.assert_close(x, expected)
    rounded = GroupScaled.quantized(torch.randn(3, 256))
    expected = rounded.dequantized() * gates[:, :1].sigmoid()
    ops.gate_(rounded, gates[:, :1])
    torch.testing.assert_close(rounded.dequantized(), expected)
