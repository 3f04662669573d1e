"""Sizes of the published Qwen3-VL and Qwen3.5 checkpoints and of tiny models for tests."""

from dataclasses import dataclass, replace

NUM_BASE_TOKENS = 151_643  # entries of the published vocabulary below the first special token
NUM_BASE_TOKENS_3_5, VOCABULARY_3_5 = 248_044, 248_320


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of each layer: their number, the number per token, and the width of one."""

    count: int
    per_token: int
    intermediate: int
    shared: int = 0  # width of the expert shared by all tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """Heads of Gated DeltaNet, in three of four layers."""

    value_heads: int
    key_heads: int = 16
    dim: int = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """Values that differ between sizes; `configs.py` has the others.

    The ids of special tokens start at `num_base_tokens`, which gives the published ids for every published size.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool
    vision_depth: int
    vision_hidden: int
    vision_heads: int
    vision_intermediate: int
    deepstack: tuple[int, ...]
    vocab_size: int = 151_936
    num_base_tokens: int = NUM_BASE_TOKENS
    dtype: str = "bfloat16"
    experts: Experts | None = None  # if set, only config.json uses `intermediate`
    head_dim: int = 128
    mrope_section: tuple[int, int, int] = (24, 20, 20)
    delta: Delta | None = None  # Qwen3.5


def _published(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, tied: bool, big_tower: bool) -> Shape:
    depth, width, inner, deepstack = (27, 1152, 4304, (8, 16, 24)) if big_tower else (24, 1024, 4096, (5, 11, 17))
    return Shape(layers, hidden, heads, kv_heads, intermediate, tied, depth, width, 16, inner, deepstack)


def _hybrid(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, value_heads: int, tied: bool = False, big_tower: bool = True
) -> Shape:
    """Return a shape of Qwen3.5. The tower of the small sizes is assumed to be Qwen3-VL's small one."""
    shape = _published(layers, hidden, heads, kv_heads, intermediate, tied, big_tower)
    shape = replace(shape, vocab_size=VOCABULARY_3_5, num_base_tokens=NUM_BASE_TOKENS_3_5, deepstack=())
    return replace(shape, head_dim=256, mrope_section=(11, 11, 10), delta=Delta(value_heads))


TINY = Shape(4, 128, 4, 2, 256, False, 5, 64, 4, 128, (1, 2, 3), vocab_size=4096, num_base_tokens=4000, dtype="float32")
TINY_3_5 = replace(TINY, deepstack=(), mrope_section=(6, 5, 5), delta=Delta(4, 2, 64))

SHAPES: dict[str, Shape] = {
    "2B": _published(28, 2048, 16, 8, 6144, tied=True, big_tower=False),
    "4B": _published(36, 2560, 32, 8, 9728, tied=True, big_tower=False),
    "8B": _published(36, 4096, 32, 8, 12288, tied=False, big_tower=True),
    "32B": _published(64, 5120, 64, 8, 25600, tied=False, big_tower=True),
    "30B-A3B": replace(_published(48, 2048, 32, 4, 6144, tied=False, big_tower=True), experts=Experts(128, 8, 768)),
    "235B-A22B": replace(_published(94, 4096, 64, 4, 12288, tied=False, big_tower=True), experts=Experts(128, 8, 1536)),
    "3.5-0.8B": _hybrid(24, 1024, 8, 2, 3584, 16, tied=True, big_tower=False),
    "3.5-2B": _hybrid(24, 2048, 8, 2, 6144, 16, tied=True, big_tower=False),
    "3.5-4B": _hybrid(32, 2560, 16, 4, 9216, 32, tied=True, big_tower=False),
    "3.5-9B": _hybrid(32, 4096, 16, 4, 12288, 32),
    "3.5-27B": _hybrid(64, 5120, 24, 4, 17408, 48),
    "3.5-35B-A3B": replace(_hybrid(40, 2048, 16, 2, 0, 32), experts=Experts(256, 8, 512, 512)),
    "3.5-122B-A10B": replace(_hybrid(48, 3072, 32, 2, 0, 64), experts=Experts(256, 8, 1024, 1024)),
    "3.5-397B-A17B": replace(_hybrid(60, 4096, 32, 2, 0, 64), experts=Experts(512, 10, 1024, 1024)),
    # About 2 M parameters and 1 M of embeddings; a small vocabulary keeps logits and files small. float32, since tests compare tokens.
    "tiny": TINY,
    # Experts have no square matrix: transformers distinguishes the published layout from its own by the shapes.
    "tiny-moe": replace(TINY, experts=Experts(8, 2, 256)),
    "3.5-tiny": TINY_3_5,
    "3.5-tiny-moe": replace(TINY_3_5, experts=Experts(8, 2, 256, 256)),
}
