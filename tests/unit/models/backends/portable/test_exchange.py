"""Collectives of several ranks in Triton's interpreter, each rank a process, over memory that all map."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.parallel.group import Exchange
from tests.unit.models.backends.portable.interpreter import in_gate, interpreted
from tests.unit.models.ranks import start_ranks

ROUNDS = {2: 2, 3: 2}  # of so many ranks: each polls, and a test has few cores
CPU = torch.device("cpu")


def whole(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Return integers, whose sums are exact."""
    return torch.randint(-9, 9, shape, generator=generator).float()


def assert_right(exchange: Exchange, rank: int, size: int, device: torch.device, rounds: int, between: Callable[[], object]) -> None:
    generator, choose = torch.Generator().manual_seed(0), random.Random(0)
    for _ in range(rounds):
        num_tokens, width, num_parts = choose.choice([1, 1, 3]), choose.choice([64, 514, 1500]), choose.choice([1, 8])
        of_parts = choose.choice([torch.float32, torch.bfloat16])
        parts = whole(generator, size, num_parts, num_tokens, width).to(device, of_parts)
        stream = whole(generator, num_tokens, width).to(device, torch.bfloat16)
        expected = (stream.float() + parts.float().sum((0, 1))).bfloat16()
        between()
        exchange.add_sum_(stream, parts[rank])
        assert torch.equal(stream, expected)
        mine = parts[:, 0].bfloat16()
        between()
        assert torch.equal(exchange.sum_(mine[rank].clone()), mine.float().sum(0).bfloat16())
        columns = torch.randn((size, num_tokens, width), generator=generator).to(device)
        between()
        assert torch.equal(exchange.gather_columns(columns[rank]), torch.cat(list(columns), dim=1))
        for _ in range(choose.choice([1, 3])):
            tokens = torch.randint(1 << 40, (size, num_tokens), generator=generator).to(device)
            between()
            assert torch.equal(exchange.broadcast_(tokens[rank].clone()), tokens[0])


def rank_of(rank: int, size: int, folder: Path) -> None:
    from models.kernels.triton.exchange import TritonExchange, inbox_bytes

    words = inbox_bytes(size) // 8
    inboxes = [torch.from_file(str(folder / str(peer)), shared=True, size=words, dtype=torch.int64) for peer in range(size)]
    exchange = TritonExchange(rank, inboxes, CPU)
    exchange.check(CPU)
    assert_right(exchange, rank, size, CPU, ROUNDS[size], lambda: None)


@interpreted
@pytest.mark.parametrize("size", [pytest.param(2, marks=in_gate), 3])
def test_every_rank_gets_what_the_others_have(size: int, tmp_path: Path) -> None:
    start_ranks(rank_of, size, tmp_path)


@interpreted(gate=True)
def test_numbers_of_exchanges_may_wrap(tmp_path: Path) -> None:
    from models.kernels.triton.exchange import TritonExchange, inbox_bytes

    inboxes = [torch.zeros(inbox_bytes(2) // 8, dtype=torch.int64) for _ in range(2)]
    exchange = TritonExchange(0, inboxes, CPU)
    for epoch in (2**31 - 1, -(2**31), -1, 0, 1):
        exchange._epochs.fill_(epoch - 1 if epoch != -(2**31) else 2**31 - 1)
        place = ((epoch & 1) * exchange._ranks["PROGRAMS"] * 2 + 1) * exchange._ranks["BLOCK"]
        inboxes[0][place : place + 256] = (epoch << 32) | 0x40004000  # 2.0 and 2.0, from rank 1
        assert exchange.sum_(torch.ones((1, 64), dtype=torch.bfloat16)).tolist() == [[3.0] * 64]
