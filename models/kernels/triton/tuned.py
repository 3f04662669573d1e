"""Tuned parameters, measured or limited by a GPU's shared memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of an attention kernel. Rows: query tokens times the heads that share a KV head."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """`chunk` for many query tokens, `few` for decode rows; `blocks` of these run at once on a multiprocessor."""

    chunk: Tiles
    few: Tiles
    blocks: int


LARGE = AttentionTiles(Tiles(128, 64, 8, 3), Tiles(16, 64, 4, 3), blocks=4)  # 160 KB of shared memory and more
SMALL = AttentionTiles(Tiles(128, 32, 8, 2), Tiles(16, 32, 4, 3), blocks=3)  # 99 KB
WIDE_HOPPER = AttentionTiles(Tiles(128, 64, 8, 3), Tiles(16, 32, 4, 2), blocks=3)  # heads of more than 128 values; 200 KB and more
WIDE = {  # other GPUs: sizes that fit, not measured
    LARGE: AttentionTiles(Tiles(128, 32, 8, 2), Tiles(16, 32, 4, 2), blocks=2),
    SMALL: AttentionTiles(Tiles(64, 16, 4, 2), Tiles(16, 16, 4, 2), blocks=2),
}
ATTENTION = {(8, 0): LARGE, (8, 6): SMALL, (8, 7): LARGE, (8, 9): SMALL, (9, 0): LARGE, (10, 0): LARGE, (10, 3): LARGE, (12, 0): SMALL}


def attention_tiles(capability: tuple[int, int], head_dim: int) -> AttentionTiles:
    tiles = ATTENTION.get(capability, SMALL)
    if head_dim <= 128:
        return tiles
    return WIDE_HOPPER if capability >= (9, 0) and tiles == LARGE else WIDE[tiles]


@dataclass(frozen=True, slots=True)
class GemvTiles:
    """Tiles of a matrix-vector product: rows and values per iteration, warps, programs per multiprocessor."""

    rows: int
    block: int
    warps: int = 8
    programs: int = 4


GEMV_VALUES = 16_384  # matrix values that a program loads at once: enough to saturate memory within its registers
LONG_BLOCK = 4096  # values of a vector that may be processed in blocks
FEW_ROWS = 1024  # programs with one row each fill the device
Device = tuple[tuple[int, int], int]  # compute capability, number of multiprocessors
GEMV_TILES: dict[Device, dict[tuple[int, int, bool], GemvTiles]] = {  # shapes with better tiles, measured in chains of products
    ((9, 0), 132): {  # measured on an H200
        (4096, 2048, False): GemvTiles(2, 2048, 4, 8),  # 2B: rows of the result, values of the vector, whether it is gated
        (2048, 2048, False): GemvTiles(8, 2048, 8, 4),
        (2048, 6144, False): GemvTiles(4, 2048, 4, 8),
        (5120, 2048, False): GemvTiles(4, 2048, 4, 8),  # 30B-A3B
        (2048, 4096, False): GemvTiles(2, 4096, 8, 4),
        (5120, 17408, False): GemvTiles(2, 2048, 4, 8),  # 3.5-27B
        (12288, 2048, False): GemvTiles(4, 2048, 4, 8),  # 3.5-35B-A3B
    },
}


def gemv_tiles(num_out: int, width: int, gated: bool, is_whole: bool, device: Device) -> GemvTiles:
    """Return the tiles. If `is_whole`, the vector must be one block."""
    tuned = GEMV_TILES.get(device, {}).get((num_out, width, gated))
    if tuned is not None and (width <= tuned.block or not is_whole):
        return tuned
    whole = 1 << (width - 1).bit_length()
    block = whole if is_whole else min(whole, LONG_BLOCK)
    rows = 1 if num_out <= FEW_ROWS else max(1, min(4, GEMV_VALUES // (block * (1 + gated))) // (1 + gated))
    return GemvTiles(rows, block)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tiles of experts, up to so many tokens: rows (choices), columns (gate and up: half of each), inputs at once, warps, stages. In
    float8, at most 128 columns per projection."""

    num_tokens: int
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# 128 experts of 768 values, 8 for a token.
ANY = 1 << 30
EXPERT_TILES = {  # by whether there is little shared memory, as above, and whether matrices are float8
    (False, False): (
        ExpertTiles(128, 16, 64, 128, 4, 4),
        ExpertTiles(384, 32, 128, 128, 4, 3),
        ExpertTiles(1024, 64, 128, 64, 4, 3),
        ExpertTiles(ANY, 128, 128, 64, 8, 3),
    ),
    (False, True): (
        ExpertTiles(208, 16, 128, 128, 4, 4),
        ExpertTiles(ANY, 64, 128, 128, 4, 4),
    ),
    (True, False): (
        ExpertTiles(128, 16, 128, 64, 4, 3),
        ExpertTiles(320, 32, 128, 64, 4, 3),
        ExpertTiles(ANY, 64, 128, 64, 4, 3),
    ),
    (True, True): (ExpertTiles(128, 16, 128, 128, 4, 3), ExpertTiles(ANY, 64, 128, 128, 4, 3)),
}

FEW_GATED = ExpertTiles(208, 16, 64, 256, 4, 3)  # gated products in float8 with much shared memory


def expert_tiles(num_tokens: int, is_float8: bool, capability: tuple[int, int], is_gated: bool) -> ExpertTiles:
    is_small = ATTENTION.get(capability, SMALL) is SMALL
    if is_gated and is_float8 and not is_small and num_tokens <= FEW_GATED.num_tokens:
        return FEW_GATED
    return next(tiles for tiles in EXPERT_TILES[is_small, is_float8] if num_tokens <= tiles.num_tokens)
