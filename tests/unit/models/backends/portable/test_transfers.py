"""The kernels that bring a step's arrays and take its tokens back, in the interpreter against torch's copies."""

import pytest
import torch

from models.kernels.transfers import Transfers
from tests.unit.models.backends.portable.interpreter import in_gate, interpreted


@interpreted
@pytest.mark.parametrize("num_bytes", [0, 128, 4096, pytest.param(4224, marks=in_gate), 65_536, 100, 70_000])
def test_fetch(num_bytes: int) -> None:
    from models.kernels.triton.transfers import TritonTransfers

    host = torch.randint(256, (num_bytes + 128,), dtype=torch.uint8)
    device = torch.zeros_like(host)
    TritonTransfers(host.device).fetch_(device[:num_bytes], host[:num_bytes])
    assert device[:num_bytes].equal(host[:num_bytes]) and not device[num_bytes:].any()


@interpreted
@pytest.mark.parametrize("count", [1, 7, 128, pytest.param(129, marks=in_gate), 300])
def test_deliver(count: int) -> None:
    from models.kernels.triton.transfers import TritonTransfers

    rows, tokens = torch.randperm(512)[:count], torch.randint(1 << 40, (count,))
    ours, theirs = torch.arange(512), torch.arange(512)
    found, expected = TritonTransfers(rows.device).deliver_(tokens, rows, ours), Transfers().deliver_(tokens, rows, theirs)
    assert found.equal(expected) and ours.equal(theirs)
