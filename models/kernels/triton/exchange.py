"""Collectives of few values over GPUs that map each other's memory, a kernel each.

Every rank has an inbox. A message of 8 bytes is 4 bytes of values beside the number of its exchange, and arrives as one: whoever polls it
needs no flag and no barrier, as in NCCL's protocol LL. Two places for each message, used in turn, are enough: who sends number n has
received number n - 1 of the other rank, which sent that after it had read number n - 2.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.triton.launch import await_previous_kernel, early_launch, floats

BLOCK = 256  # messages of a program
MAX_PROGRAMS = 512  # of an exchange: all of them are on a device at once, since each waits for the same one of the other ranks
MAX_WORDS = BLOCK * MAX_PROGRAMS
QUICK_POLLS = tl.constexpr(32)  # some 20 us


@triton.jit
def _begin(epochs: tensor, OVERLAP: constexpr) -> tensor:
    """The number of this program's exchange, which is the same on all ranks."""
    await_previous_kernel(OVERLAP)
    return tl.load(epochs + tl.program_id(0)) + 1


@triton.jit
def _place(epoch: tensor, SIZE: constexpr, PROGRAMS: constexpr, BLOCK: constexpr) -> tensor:
    """Where this program's messages of rank 0 are; those of the others follow."""
    return (((epoch & 1) * PROGRAMS + tl.program_id(0)) * SIZE).to(tl.int64) * BLOCK


@triton.jit
def _send(
    word: tensor, inboxes: tl.tuple, epoch: tensor, RANK: constexpr, SIZE: constexpr, PROGRAMS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """BLOCK uint32 to every other rank."""
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
    """BLOCK messages of `source`."""
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


@triton.jit(do_not_specialize=["num_words"])
def _sum(
    stream: tensor, parts: tensor, inboxes: tl.tuple, epochs: tensor, num_words: tensor, ADD: constexpr, PARTS: constexpr, RANK: constexpr,
    SIZE: constexpr, PROGRAMS: constexpr, BLOCK: constexpr, NAPS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: BLOCK pairs of values of the stream, which the sum over PARTS and ranks is added to or replaces. Each rank's is rounded
    to bfloat16; all add them in the same order, so all have the same bits."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    epoch = _begin(epochs, OVERLAP)
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


@triton.jit(do_not_specialize=["num_words", "width"])
def _gather(
    values: tensor, out: tensor, inboxes: tl.tuple, epochs: tensor, num_words: tensor, width: tensor, FIRST: constexpr, RANK: constexpr,
    SIZE: constexpr, PROGRAMS: constexpr, BLOCK: constexpr, NAPS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: BLOCK int32 of each rank. In `out` rows of `width` of each rank lie side by side; if FIRST, those of rank 0 alone: every
    rank sends also then, since what arrives says that what was sent before has been read."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    epoch = _begin(epochs, OVERLAP)
    mine = tl.load(values + word, inside, 0).to(tl.uint32, bitcast=True)
    _send(mine, inboxes, epoch, RANK, SIZE, PROGRAMS, BLOCK)
    seen = epoch
    for source in tl.static_range(SIZE):
        got = mine
        if source != RANK:
            message = _receive(source, inboxes, epoch, RANK, SIZE, PROGRAMS, BLOCK, NAPS)
            got = message.to(tl.uint32)
            seen = tl.maximum(seen, tl.max((message >> 32).to(tl.int32), 0))  # Triton 3.6 cannot compile a loop of no use
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
        """`inboxes` of all ranks, `inbox_bytes` each, as this one sees them: zeros, before any rank uses them."""
        self._inboxes = tuple(inboxes)  # this rank's own tensor keeps its memory, and that of the others mapped
        self._epochs = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        sizes = {"SIZE": len(inboxes), "PROGRAMS": MAX_PROGRAMS, "BLOCK": BLOCK, "num_warps": 4}
        self._ranks = {"RANK": rank, **sizes, "NAPS": device.type == "cuda"}

    @classmethod
    def over(cls, group: dist.ProcessGroup, device: torch.device) -> "TritonExchange":
        """For GPUs of one host, all at the same time."""
        rank, size = group.rank(), group.size()
        memory = symmetric_memory.empty(inbox_bytes(size) // 8, dtype=torch.int64, device=device)
        mapped = symmetric_memory.rendezvous(memory, group)
        memory.zero_()
        peers = [memory if peer == rank else mapped.get_buffer(peer, memory.shape, memory.dtype) for peer in range(size)]
        exchange = cls(rank, peers, device)
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[memory.device.index])  # nobody writes into what is not zero yet
        exchange.check(device)
        return exchange

    def check(self, device: torch.device) -> None:
        """RuntimeError if what comes out is wrong on these GPUs."""
        rank, size = self._ranks["RANK"], self._ranks["SIZE"]
        summed = self.sum_(torch.full((1, 2), rank + 1.0, dtype=torch.bfloat16, device=device)).tolist()
        first = self.broadcast_(torch.full((1,), rank + 1, device=device)).tolist()
        if summed != [[size * (size + 1) / 2] * 2] or first != [1]:
            raise RuntimeError(f"sums in symmetric memory are wrong on these GPUs ({summed} of {size}, {first}): use --no-symmetric-memory")

    def add_sum_(self, stream_TD: torch.Tensor, parts_STD: torch.Tensor) -> None:
        self._launch_sum(stream_TD, parts_STD, add=True)

    def sum_(self, x_TD: torch.Tensor) -> torch.Tensor:
        self._launch_sum(x_TD, x_TD[None], add=False)
        return x_TD

    def gather_columns(self, x_SN: torch.Tensor) -> torch.Tensor:
        out_SX = x_SN.new_empty((len(x_SN), x_SN.shape[1] * len(self._inboxes)))
        self._launch_gather(x_SN, out_SX, first=False)
        return out_SX

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        self._launch_gather(x, x, first=True)
        return x

    def _launch_sum(self, stream_TD: torch.Tensor, parts_STD: torch.Tensor, add: bool) -> None:
        assert stream_TD.is_contiguous() and parts_STD.is_contiguous() and stream_TD.shape == parts_STD.shape[1:]
        num_words = stream_TD.numel() // 2
        _sum[(triton.cdiv(num_words, BLOCK),)](
            stream_TD, parts_STD, self._inboxes, self._epochs, num_words,
            ADD=add, PARTS=len(parts_STD), **self._ranks, **early_launch(stream_TD),
        )  # fmt: skip

    def _launch_gather(self, values: torch.Tensor, out: torch.Tensor, first: bool) -> None:
        assert values.is_contiguous() and out.is_contiguous()
        words, width = values.view(torch.int32), values.shape[-1] * values.itemsize // 4
        _gather[(triton.cdiv(words.numel(), BLOCK),)](
            words, out.view(torch.int32), self._inboxes, self._epochs, words.numel(), width,
            FIRST=first, **self._ranks, **early_launch(values),
        )  # fmt: skip


def inbox_bytes(size: int) -> int:
    """Of a rank of `size`: two places for each message of each rank."""
    return 2 * MAX_WORDS * size * 8
