"""The sizes of the Qwen3-VL checkpoints as published, and of tiny models that the tests run. Used by the scaffold."""

from dataclasses import dataclass, replace

NUM_BASE_TOKENS = 151_643  # entries of the published vocabulary below the first special token


@dataclass(frozen=True, slots=True)
class Experts:
    """Of each layer: how many, how many of them a token is given to, and the width of one."""

    count: int
    per_token: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything in which one size differs from another; what all sizes share is in `configs.py`.

    Special tokens take the ids from `num_base_tokens` up; for every published size that gives their published ids.
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
    experts: Experts | None = None  # `intermediate` is then in config.json alone


def _published(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, tied: bool, big_tower: bool) -> Shape:
    depth, width, inner, deepstack = (27, 1152, 4304, (8, 16, 24)) if big_tower else (24, 1024, 4096, (5, 11, 17))
    return Shape(layers, hidden, heads, kv_heads, intermediate, tied, depth, width, 16, inner, deepstack)


TINY = Shape(4, 128, 4, 2, 256, False, 5, 64, 4, 128, (1, 2, 3), vocab_size=4096, num_base_tokens=4000, dtype="float32")

SHAPES: dict[str, Shape] = {
    "2B": _published(28, 2048, 16, 8, 6144, tied=True, big_tower=False),
    "4B": _published(36, 2560, 32, 8, 9728, tied=True, big_tower=False),
    "8B": _published(36, 4096, 32, 8, 12288, tied=False, big_tower=True),
    "32B": _published(64, 5120, 64, 8, 25600, tied=False, big_tower=True),
    "30B-A3B": replace(_published(48, 2048, 32, 4, 6144, tied=False, big_tower=True), experts=Experts(128, 8, 768)),
    "235B-A22B": replace(_published(94, 4096, 64, 4, 12288, tied=False, big_tower=True), experts=Experts(128, 8, 1536)),
    # About 2 M parameters besides 1 M of embeddings; a small vocabulary keeps logits and files small. float32: its tests compare tokens.
    "tiny": TINY,
    # No matrix of an expert is square: transformers tells the published layout from its own by shapes.
    "tiny-moe": replace(TINY, experts=Experts(8, 2, 256)),
}
