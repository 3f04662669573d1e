"""Cases of Gated DeltaNet, without the products around it: a prompt in one chunk, and decoding."""

from collections.abc import Iterator
from functools import partial

import torch

from bench.kernels.expert_cases import BF16, EPS
from bench.kernels.timing import Case, copies
from models.config.types import DeltaConfig
from models.kernels.ops import DELTA_CHUNK, DeltaHeads, DeltaState, Ops, StateRows

ROWS = (1, 8, 64)
DRAFTS = 3  # of rows that verify some, of which all hold


def delta_cases(delta: DeltaConfig, ops: Ops, device: torch.device, chunk: int) -> Iterator[Case]:
    yield delta_rule(delta, ops, device, [chunk], num_prefill=1)
    for rows in ROWS:
        yield delta_rule(delta, ops, device, [1] * rows, num_prefill=0)
    for rows in ROWS[:2]:
        yield delta_rule(delta, ops, device, [1 + DRAFTS] * rows, num_prefill=0)


def delta_rule(delta: DeltaConfig, ops: Ops, device: torch.device, counts: list[int], num_prefill: int) -> Case:
    """Bound by inputs, outputs and states, read and written once, and by the products of chunks."""
    total, heads, width = sum(counts), delta.num_value_heads, delta.num_value_heads * delta.value_dim
    drafts = 0 if num_prefill else counts[0] - 1
    state_bytes = delta.state_bytes(1, BF16) + drafts * delta.draft_bytes(1, BF16)
    num_bytes = total * (delta.conv_width + 2 * width + 2 * heads) * BF16 + 2 * len(counts) * state_bytes
    of_token = DELTA_CHUNK * (3 * delta.key_dim + 2 * delta.value_dim) + 3 * delta.key_dim * delta.value_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    given = DeltaHeads(
        normal(total, delta.conv_width + width).bfloat16(), normal(total, 2 * heads).bfloat16(),
        normal(delta.conv_width, delta.kernel_size).bfloat16(), normal(heads), normal(heads), normal(delta.value_dim).bfloat16(), EPS,
        delta.num_key_heads, delta.key_dim,
    )  # fmt: skip
    accepted, sizes = torch.full((len(counts),), drafts, device=device), (heads, delta.key_dim, delta.value_dim)
    layers = [
        DeltaState.of(torch.zeros((len(counts), state_bytes), dtype=torch.uint8, device=device), accepted, sizes, given.conv_CW, drafts)
        for _ in range(copies(num_bytes))
    ]
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    rows = StateRows(torch.arange(len(counts), device=device), starts, num_prefill)
    flops = 2.0 * total * heads * of_token if num_prefill else 0.0
    name, shape = ("delta rule, prompt", f"{total} tokens") if num_prefill else ("delta rule, decode", f"{len(counts)} rows of {counts[0]}")
    return Case(name, f"{shape}, {heads} heads", flops, num_bytes, [partial(ops.delta_rule_, given, state, rows) for state in layers])
