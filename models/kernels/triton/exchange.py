"""Collectives of few values in one kernel each, over GPUs that map each other's memory.

Every rank has an inbox. A message of 8 bytes has 4 bytes of values and the number of its exchange and arrives atomically, so a receiver
needs neither flags nor barriers, as in NCCL's protocol LL. Two alternating slots per message suffice: the sender of number n has received
number n - 1 of the other rank, which sent it after reading number n - 2.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.triton.launch import await_previous_kernel, cdiv, floats, kernel

BLOCK = 256  # messages per program
MAX_PROGRAMS = 512  # programs per exchange: all must be resident, since each waits for its counterparts on the other ranks
MAX_WORDS = BLOCK * MAX_PROGRAMS
QUICK_POLLS = tl.constexpr(32)  # some 20 us


@triton.jit
def _place(epoch: tensor, SIZE: constexpr, PROGRAMS: constexpr, BLOCK: constexpr) -> tensor:
    """Return the offset of this program's messages of rank 0; those of other ranks follow."""
    return (((epoch & 1) * PROGRAMS + tl.program_id(0)) * SIZE).to(tl.int64) * BLOCK


@triton.jit
def _send(
    word: tensor, inboxes: tl.tuple, epoch: tensor, RANK: constexpr, SIZE: constexpr, PROGRAMS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Send BLOCK uint32 to every other rank."""
    message = (epoch.to(tl.int64) << 32) | word.to(tl.int64)
    place = _place(epoch, SIZE, PROGRAMS, BLOCK) + RANK * BLOCK + tl.arange(0, BLOCK)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(inboxes[peer] + place, message)


@triton.jit
def _receive(
    source: constexpr, inboxes: tl.tuple, epoch: tensor, RANK: constexpr, SIZE: constexpr, PROGRAMS: constexpr, BLOCK: constexpr,
    NAPS: constexpr,
) -> tensor:  # fmt: skip
    """Receive BLOCK messages of `source`."""
    place = inboxes[RANK] + _place(epoch, SIZE, PROGRAMS, BLOCK) + source * BLOCK + tl.arange(0, BLOCK)
    message = tl.load(place, volatile=True)
    polls = 0
    while tl.max(((message >> 32).to(tl.int32) != epoch).to(tl.int32), 0) > 0:
        if NAPS:
            polls += 1
            if polls > QUICK_POLLS:
                tl.inline_asm_elementwise("nanosleep.u32 1000; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        message = tl.load(place, volatile=True)
    return message


@kernel(do_not_specialize=["num_words"])
def _sum(
    stream: tensor, parts: tensor, inboxes: tl.tuple, epochs: tensor, num_words: tensor, ADD: constexpr, PARTS: constexpr, RANK: constexpr,
    SIZE: constexpr, PROGRAMS: constexpr, BLOCK: constexpr, NAPS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: add the sum over PARTS and ranks to BLOCK pairs of the stream, or replace them. Each rank's sum is rounded to bfloat16,
    and all ranks add in the same order, so results are bitwise equal."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    await_previous_kernel(OVERLAP)
    epoch = tl.load(epochs + tl.program_id(0)) + 1  # number of this program's exchange, equal on all ranks
    low, high = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        place = parts + (part * num_words).to(tl.int64) * 2 + word * 2
        low += floats(place, inside)
        high += floats(place + 1, inside)
    low_bits = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    high_bits = high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    mine = low_bits | (high_bits << 16)
    _send(mine, inboxes, epoch, RANK, SIZE, PROGRAMS, BLOCK)
    old_low, old_high = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if ADD:
        old_low = floats(stream + word * 2, inside)
        old_high = floats(stream + word * 2 + 1, inside)
    low, high = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(SIZE):
        got = mine
        if source != RANK:
            got = _receive(source, inboxes, epoch, RANK, SIZE, PROGRAMS, BLOCK, NAPS).to(tl.uint32)
        low += (got << 16).to(tl.float32, bitcast=True)
        high += (got & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(stream + word * 2, (old_low + low).to(stream.dtype.element_ty), inside)
    tl.store(stream + word * 2 + 1, (old_high + high).to(stream.dtype.element_ty), inside)
    tl.store(epochs + tl.program_id(0), epoch)


@kernel(do_not_specialize=["num_words", "width"])
def _gather(
    values: tensor, out: tensor, inboxes: tl.tuple, epochs: tensor, num_words: tensor, width: tensor, FIRST: constexpr, RANK: constexpr,
    SIZE: constexpr, PROGRAMS: constexpr, BLOCK: constexpr, NAPS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: gather BLOCK int32 of each rank. Rows of `width` of all ranks are side by side in `out`; if FIRST, only rank 0's. Every
    rank still sends, because a message acknowledges the previous one."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    await_previous_kernel(OVERLAP)
    epoch = tl.load(epochs + tl.program_id(0)) + 1  # number of this program's exchange, equal on all ranks
    mine = tl.load(values + word, inside, 0).to(tl.uint32, bitcast=True)
    _send(mine, inboxes, epoch, RANK, SIZE, PROGRAMS, BLOCK)
    seen = epoch
    for source in tl.static_range(SIZE):
        got = mine
        if source != RANK:
            message = _receive(source, inboxes, epoch, RANK, SIZE, PROGRAMS, BLOCK, NAPS)
            got = message.to(tl.uint32)
            seen = tl.maximum(seen, tl.max((message >> 32).to(tl.int32), 0))  # Triton 3.6 cannot compile a loop without effect
        if FIRST:
            if source == 0:
                tl.store(out + word, got.to(tl.int32, bitcast=True), inside)
        else:
            tl.store(out + (word // width * SIZE + source) * width + word % width, got.to(tl.int32, bitcast=True), inside)
    tl.store(epochs + tl.program_id(0), seen)


class TritonExchange:
    """See `models.parallel.group.Exchange`: the same calls on all ranks, on one stream."""

    max_bytes = 4 * MAX_WORDS

    def __init__(self, rank: int, inboxes: Sequence[torch.Tensor], device: torch.device) -> None:
        """`inboxes` of all ranks, `inbox_bytes` each, mapped by this rank and zeroed before use."""
        self._inboxes = tuple(inboxes)  # this tensor keeps its own memory and the mapping of the others alive
        self._epochs = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        sizes = {"SIZE": len(inboxes), "PROGRAMS": MAX_PROGRAMS, "BLOCK": BLOCK, "num_warps": 4}
        self._ranks = {"RANK": rank, **sizes, "NAPS": device.type == "cuda"}

    @classmethod
    def over(cls, group: dist.ProcessGroup, device: torch.device) -> "TritonExchange":
        """Create the exchange for GPUs of one host. Collective."""
        rank, size = group.rank(), group.size()
        memory = symmetric_memory.empty(inbox_bytes(size) // 8, dtype=torch.int64, device=device)
        mapped = symmetric_memory.rendezvous(memory, group)
        memory.zero_()
        peers = [memory if peer == rank else mapped.get_buffer(peer, memory.shape, memory.dtype) for peer in range(size)]
        exchange = cls(rank, peers, device)
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[memory.device.index])  # no rank may write before all are zeroed
        exchange.check(device)
        return exchange

    def check(self, device: torch.device) -> None:
        """RuntimeError if results are wrong on these GPUs."""
        rank, size = self._ranks["RANK"], self._ranks["SIZE"]
        summed = self.sum_(torch.full((1, 2), rank + 1.0, dtype=torch.bfloat16, device=device)).tolist()
        first = self.broadcast_(torch.full((1,), rank + 1, device=device)).tolist()
        if summed != [[size * (size + 1) / 2] * 2] or first != [1]:
            raise RuntimeError(f"sums in symmetric memory are wrong on these GPUs ({summed} of {size}, {first}): use --no-symmetric-memory")

    def add_sum_(self, stream_TD: torch.Tensor, parts_STD: torch.Tensor, adds: bool = True) -> None:
        assert stream_TD.is_contiguous() and parts_STD.is_contiguous() and stream_TD.shape == parts_STD.shape[1:]
        num_words = stream_TD.numel() // 2
        _sum[(cdiv(num_words, BLOCK),)](
            stream_TD, parts_STD, self._inboxes, self._epochs, num_words, ADD=adds, PARTS=len(parts_STD), **self._ranks
        )

    def sum_(self, x_TD: torch.Tensor) -> torch.Tensor:
        self.add_sum_(x_TD, x_TD[None], adds=False)
        return x_TD

    def gather_columns(self, x_SN: torch.Tensor) -> torch.Tensor:
        out_SX = x_SN.new_empty((len(x_SN), x_SN.shape[1] * len(self._inboxes)))
        self._launch_gather(x_SN, out_SX, first=False)
        return out_SX

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        self._launch_gather(x, x, first=True)
        return x

    def _launch_gather(self, values: torch.Tensor, out: torch.Tensor, first: bool) -> None:
        assert values.is_contiguous() and out.is_contiguous()
        words, width = values.view(torch.int32), values.shape[-1] * values.itemsize // 4
        _gather[(cdiv(words.numel(), BLOCK),)](
            words, out.view(torch.int32), self._inboxes, self._epochs, words.numel(), width, FIRST=first, **self._ranks
        )


def inbox_bytes(size: int) -> int:
    """Return the size of a rank's inbox: two slots per message and rank."""
    return 2 * MAX_WORDS * size * 8
