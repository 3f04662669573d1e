"""Low-rank products of adapters: shrink and expand, for prompts and decode rows alike.

Once per step the tokens are grouped into tiles of one slot. Grids depend on shapes alone, as CUDA graphs require: there are as many tiles
as the tokens may need, and programs of unused ones end at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.triton.launch import await_previous_kernel, cdiv, floats, kernel, num_multiprocessors, power_of_2
from models.lora import targets
from models.lora.low_rank import BLOCK_ROWS, LowRank, TokenSlots

RANK_STEP = targets.RANK_STEP  # ranks of one product of tiles when expanding: every slot's rank is a multiple
MOST_VALUES = 1 << 31  # of the matrices, whose offsets are int32
RANKS = 64  # most ranks of one product of tiles when shrinking
LEAST_SPLIT, MOST_SPLITS = 1024, 8  # inputs of a program; parts of the inputs, whose results each program of `_expand` adds
SHRINK_PROGRAMS, EXPAND_PROGRAMS = 2, 8  # per multiprocessor
GROUPED_TOKENS = 256  # tokens that are grouped at once
WARPS = 4
PARALLEL_TOKENS = 304  # up to here A @ x is computed in parallel with the product, which mostly waits for its matrix


# Up to so many tokens: tokens of a tile; when shrinking, columns of a product, and number of products whose inputs are loaded in advance.
TILE_SHAPES = ((128, (16, 256, 3)), (1 << 30, (64, 64, 5)))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tokens of a step in tiles of one slot."""

    tokens_X: torch.Tensor  # int32: indices of the tokens of the tiles, -1 at the end of a slot's last tile
    slots_Y: torch.Tensor  # int32: slot of each tile, ascending; the number of slots: tokens without an adapter; last, -1: unused
    used_2: torch.Tensor  # int32: number of tiles with an adapter, and of all that are used
    shape: tuple[int, int, int]  # see TILE_SHAPES


@kernel(do_not_specialize=["num_tokens", "num_tiles"])
def _group(
    slots: tensor, tokens: tensor, slots_of_tiles: tensor, used: tensor, num_tokens: tensor, num_tiles: tensor, NUM_SLOTS: constexpr,
    KINDS: constexpr, SIZE: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """A single program: count the tokens of each slot, and assign each token a place in the tiles of its slot."""
    kind, index = tl.arange(0, KINDS), tl.arange(0, BLOCK)
    counts = tl.zeros((KINDS,), tl.int32)
    for start in range(0, num_tokens, BLOCK):
        slot = tl.load(slots + start + index, start + index < num_tokens, KINDS)
        slot = tl.where(slot < 0, NUM_SLOTS, slot)
        counts += tl.sum((slot[:, None] == kind[None, :]).to(tl.int32), 0)
    last = tl.cumsum((counts + SIZE - 1) // SIZE, 0)
    first = last - (counts + SIZE - 1) // SIZE
    tl.store(used, tl.sum(tl.where(kind < NUM_SLOTS, last - first, 0), 0))
    tl.store(used + 1, tl.sum(last - first, 0))
    for start in range(0, num_tiles, BLOCK):
        tile = start + index
        is_of = (tile[:, None] >= first[None, :]) & (tile[:, None] < last[None, :])
        tl.store(slots_of_tiles + tile, tl.sum(tl.where(is_of, kind[None, :] + 1, 0), 1) - 1, tile < num_tiles)
    unused = (first * SIZE + counts)[:, None] + tl.arange(0, SIZE)[None, :]
    tl.store(tokens + unused, -1, unused < (last * SIZE)[:, None])
    place = first * SIZE
    for start in range(0, num_tokens, BLOCK):
        slot = tl.load(slots + start + index, start + index < num_tokens, KINDS)
        slot = tl.where(slot < 0, NUM_SLOTS, slot)
        is_of = (slot[:, None] == kind[None, :]).to(tl.int32)
        own = tl.sum(is_of * (place[None, :] + tl.cumsum(is_of, 0) - is_of), 1)
        tl.store(tokens + own, start + index, start + index < num_tokens)
        place += tl.sum(is_of, 0)


def _tiles_of(slots: TokenSlots, num_slots: int) -> Tiles:
    """Return the tiles of a step, which are made by the first product that needs them."""
    if not isinstance(slots.tiles, Tiles):
        num_tokens, device = len(slots.slots_T), slots.slots_T.device
        shape = next(shape for most, shape in TILE_SHAPES if num_tokens <= most)
        size = shape[0]
        num_tiles = (num_tokens + min(num_slots + 1, num_tokens) * (size - 1)) // size
        tokens_X, slots_Y, used_2 = (torch.empty(n, dtype=torch.int32, device=device) for n in (num_tiles * size, num_tiles, 2))
        slots.tiles = Tiles(tokens_X, slots_Y, used_2, shape)
        _group[(1,)](
            slots.slots_T, tokens_X, slots_Y, used_2, num_tokens, num_tiles, NUM_SLOTS=num_slots,
            KINDS=power_of_2(num_slots + 1), SIZE=size, BLOCK=min(GROUPED_TOKENS, power_of_2(num_tokens)),
        )  # fmt: skip
    return slots.tiles


@kernel(do_not_specialize=["num_places"])
def _shrink(
    x: tensor, a: tensor, tokens: tensor, slots: tensor, ranks: tensor, out: tensor, num_places: tensor, WIDTH: constexpr,
    NUM_SLOTS: constexpr, GROUPS: constexpr, RANK: constexpr, RANKS: constexpr, SPLIT_WIDTH: constexpr, SIZE: constexpr,
    COLUMNS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program ((ranks, group, split), tile): A @ x over a part of the inputs, by place of the token in the tiles."""
    first = tl.program_id(0) % tl.cdiv(RANK, RANKS) * RANKS
    group = tl.program_id(0) // tl.cdiv(RANK, RANKS) % GROUPS
    split = tl.program_id(0) // (tl.cdiv(RANK, RANKS) * GROUPS)
    row, place, end = first + tl.arange(0, RANKS), tl.program_id(1) * SIZE + tl.arange(0, SIZE), min(WIDTH, (split + 1) * SPLIT_WIDTH)
    await_previous_kernel(OVERLAP)
    slot = tl.load(slots + tl.program_id(1))
    num_ranks = tl.load(ranks + slot * GROUPS + group, tl.where(slot < NUM_SLOTS, slot, -1) >= 0, 0)
    if first < num_ranks:
        token = tl.load(tokens + place)
        inputs = x + tl.maximum(token, 0)[:, None] * WIDTH
        matrix = a + (slot * GROUPS + group) * (RANK * WIDTH) + row[None, :] * WIDTH
        total = tl.zeros((SIZE, RANKS), tl.float32)
        for start in range(split * SPLIT_WIDTH, end, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            values = tl.load(inputs + column[None, :], (token >= 0)[:, None] & (column < end)[None, :], 0.0)
            weights = tl.load(matrix + column[:, None], (column < end)[:, None] & (row < num_ranks)[None, :], 0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
        results = (split * num_places + place)[:, None] * (GROUPS * RANK) + (group * RANK + row)[None, :]
        tl.store(out + results, total, (row < num_ranks)[None, :])


@triton.jit
def _factors(
    shrunk: tensor, b: tensor, slot: tensor, group: tensor, first: tensor, place: tensor, row: tensor, end: tensor, num_places: tensor,
    OUT: constexpr, GROUPS: constexpr, RANK: constexpr, RANKS: constexpr, SPLITS: constexpr, SIZE: constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Return A @ x of the tokens and rows of B, both for ranks from `first`."""
    rank = first + tl.arange(0, RANKS)
    low = tl.zeros((SIZE, RANKS), tl.float32)
    for split in tl.static_range(SPLITS):
        low += tl.load(shrunk + (split * num_places + place)[:, None] * (GROUPS * RANK) + (group * RANK + rank)[None, :])
    factors = tl.load(b + slot * (OUT * RANK) + row[None, :] * RANK + rank[:, None], (row < end)[None, :], 0.0)
    return low, factors


@triton.jit
def _plus(total: tensor, low: tensor, factors: tensor, first: tensor, num_ranks: tensor, RANKS: constexpr) -> tensor:
    """Return `total` + B @ (A @ x); values beyond the rank are undefined."""
    rank = first + tl.arange(0, RANKS)
    low = tl.where((rank < num_ranks)[None, :], low, 0.0).to(factors.dtype)
    return tl.dot(low, tl.where((rank < num_ranks)[:, None], factors, 0.0), total, input_precision="ieee")


@kernel(do_not_specialize=["num_places"])
def _expand(
    shrunk: tensor, b: tensor, tokens: tensor, slots: tensor, used: tensor, ranks: tensor, blocks: tensor, groups: tensor, product: tensor,
    out: tensor, num_places: tensor, stride: tensor, OUT: constexpr, NUM_SLOTS: constexpr, GROUPS: constexpr, RANK: constexpr,
    RANKS: constexpr, SPLITS: constexpr, SIZE: constexpr, ROWS: constexpr, ALIGNMENT: constexpr, GATED: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (block, first tile): out = product + B @ (the sum of `shrunk`) for rows of one group and the tokens of every n-th tile. If
    GATED, silu(g) * u of the halves g and u of that, for tokens without an adapter too. Latencies are what takes time: loads do not wait
    for a slot's rank, and the next tile's tokens are loaded in advance."""
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    slot, token, num_tiles = tl.load(slots + tl.program_id(1)), tl.load(tokens + place), tl.load(used + GATED)
    begin = tl.multiple_of(tl.load(blocks + tl.program_id(0) * 3), ALIGNMENT)
    end = tl.multiple_of(tl.load(blocks + tl.program_id(0) * 3 + 1), ALIGNMENT)
    group, row = tl.load(blocks + tl.program_id(0) * 3 + 2), begin + tl.arange(0, ROWS)
    both = (group, tl.load(groups + begin + OUT // 2) if GATED else group)
    await_previous_kernel(OVERLAP)
    for tile in tl.range(tl.program_id(1), num_tiles, tl.num_programs(1), num_stages=1):
        inside, values = (token >= 0)[:, None] & (row < end)[None, :], product + tl.maximum(token, 0)[:, None] * stride + row[None, :]
        results = out + tl.maximum(token, 0)[:, None] * (OUT // 2 if GATED else stride) + row[None, :]
        own = tl.where(slot < NUM_SLOTS, slot, 0)
        loaded = ()
        for half in tl.static_range(1 + GATED):
            skip = half * (OUT // 2)
            num_ranks, total = tl.load(ranks + own * GROUPS + both[half], slot < NUM_SLOTS, 0), floats(values + skip, inside)
            low, factors = _factors(
                shrunk, b, own, both[half], 0, place, row + skip, end + skip, num_places, OUT, GROUPS, RANK, RANKS, SPLITS, SIZE
            )
            loaded += (num_ranks, total, low, factors)  # type: ignore[assignment]
        next_tile = tile + tl.num_programs(1)
        next_place = next_tile * SIZE + tl.arange(0, SIZE)
        slot = tl.load(slots + next_tile, next_tile < num_tiles, 0)
        token = tl.load(tokens + next_place, next_place < tl.where(next_tile < num_tiles, num_places, 0), -1)
        sums = ()
        for half in tl.static_range(1 + GATED):
            skip, num_ranks = half * (OUT // 2), loaded[4 * half]
            total = _plus(loaded[4 * half + 1], loaded[4 * half + 2], loaded[4 * half + 3], 0, num_ranks, RANKS)
            for first in tl.range(RANKS, num_ranks, RANKS, num_stages=1):
                low, factors = _factors(
                    shrunk, b, own, both[half], first, place, row + skip, end + skip, num_places, OUT, GROUPS, RANK, RANKS, SPLITS, SIZE
                )
                total = _plus(total, low, factors, first, num_ranks, RANKS)
            sums += (total,)  # type: ignore[assignment]
        result = sums[0] / (1 + tl.exp(-sums[0])) * sums[1] if GATED else sums[0]  # type: ignore[misc]
        tl.store(results, result.to(out.dtype.element_ty), inside)
        place = next_place


class TritonLowRank:
    """See `LowRankOps`. For contiguous inputs and results with contiguous rows. `shrunk_PXR` has the places of `Tiles`, not tokens."""

    def __init__(self) -> None:
        self._second_stream: torch.cuda.Stream | None = None

    def shrink(self, x_TK: torch.Tensor, low_rank: LowRank, slots: TokenSlots) -> torch.Tensor:
        num_slots, groups, rank, width = low_rank.a_SGRK.shape
        tiles, chunks = _tiles_of(slots, num_slots), cdiv(rank, RANKS)
        size, columns, num_stages = tiles.shape
        most_programs = SHRINK_PROGRAMS * num_multiprocessors(x_TK.device)
        splits = most_programs // (cdiv(len(x_TK), size) * groups)
        splits = max(1, min(splits, MOST_SPLITS, width // LEAST_SPLIT))
        assert x_TK.is_contiguous() and len(slots.slots_T) == len(x_TK) and low_rank.a_SGRK.numel() < MOST_VALUES
        shrunk_PXR = torch.empty((splits, len(tiles.tokens_X), groups * rank), dtype=torch.float32, device=x_TK.device)
        if (second := self._second(x_TK)) is not None:
            second.wait_stream(torch.cuda.current_stream(x_TK.device))
        with torch.cuda.stream(second):  # None: the current one
            _shrink[(splits * groups * chunks, len(tiles.slots_Y))](
                x_TK, low_rank.a_SGRK, tiles.tokens_X, tiles.slots_Y, low_rank.ranks_SG, shrunk_PXR, len(tiles.tokens_X), WIDTH=width,
                NUM_SLOTS=num_slots, GROUPS=groups, RANK=rank, RANKS=min(RANKS, power_of_2(rank)),
                SPLIT_WIDTH=cdiv(cdiv(width, splits), columns) * columns, SIZE=size, COLUMNS=columns, num_warps=WARPS,
                num_stages=num_stages, **({} if second is None else {"OVERLAP": False}),
            )  # fmt: skip
        return shrunk_PXR

    def expand_(self, out_TN: torch.Tensor, shrunk_PXR: torch.Tensor, low_rank: LowRank, slots: TokenSlots) -> None:
        self._expand(out_TN, out_TN, shrunk_PXR, low_rank, slots, False)

    def expand_swiglu(self, gate_up_TN: torch.Tensor, shrunk_PXR: torch.Tensor, low_rank: LowRank, slots: TokenSlots) -> torch.Tensor:
        out_TI = gate_up_TN.new_empty((len(gate_up_TN), gate_up_TN.shape[1] // 2))
        self._expand(gate_up_TN, out_TI, shrunk_PXR, low_rank, slots, True)
        return out_TI

    def _expand(
        self, product_TN: torch.Tensor, out_TX: torch.Tensor, shrunk_PXR: torch.Tensor, low_rank: LowRank, slots: TokenSlots, is_gated: bool
    ) -> None:
        num_slots, groups, rank, _ = low_rank.a_SGRK.shape
        tiles, num_blocks = _tiles_of(slots, num_slots), len(low_rank.blocks_B3) // (1 + is_gated)
        programs = min(len(tiles.slots_Y), max(1, EXPAND_PROGRAMS * num_multiprocessors(product_TN.device) // num_blocks))
        assert product_TN.stride(1) == 1 and low_rank.b_SNR.numel() < MOST_VALUES
        if (second := self._second(product_TN)) is not None:
            torch.cuda.current_stream(product_TN.device).wait_stream(second)
        _expand[(num_blocks, programs)](
            shrunk_PXR, low_rank.b_SNR, tiles.tokens_X, tiles.slots_Y, tiles.used_2, low_rank.ranks_SG, low_rank.blocks_B3,
            low_rank.groups_N, product_TN, out_TX, len(tiles.tokens_X), product_TN.stride(0), OUT=low_rank.b_SNR.shape[1],
            NUM_SLOTS=num_slots, GROUPS=groups, RANK=rank, RANKS=RANK_STEP, SPLITS=len(shrunk_PXR),
            SIZE=tiles.shape[0], ROWS=BLOCK_ROWS, ALIGNMENT=low_rank.alignment, GATED=is_gated, num_warps=WARPS,
        )  # fmt: skip

    def _second(self, x_TX: torch.Tensor) -> torch.cuda.Stream | None:
        """Return the stream on which `shrink` runs if there are few tokens."""
        if x_TX.device.type != "cuda" or len(x_TX) > PARALLEL_TOKENS:
            return None
        self._second_stream = self._second_stream or torch.cuda.Stream(x_TX.device)
        return self._second_stream
