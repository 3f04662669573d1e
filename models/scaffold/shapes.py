"""Sizes of the published Qwen3-VL and Qwen3.5 checkpoints and of tiny models for tests."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of each layer."""

    count: int
    per_token: int
    intermediate: int  # width of one
    shared: int = 0  # width of the expert shared by all tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """Heads of Gated DeltaNet, in three of four layers."""

    value_heads: int
    key_heads: int = 16
    dim: int = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """Values that differ between sizes; `configs.py` has the others."""

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
    num_base_tokens: int = 151_643  # below the first special token
    dtype: str = "bfloat16"
    experts: Experts | None = None  # if set, only config.json uses `intermediate`
    head_dim: int = 128
    mrope_section: tuple[int, int, int] = (24, 20, 20)
    delta: Delta | None = None  # Qwen3.5


def _published(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, is_small: bool = False, experts: Experts | None = None
) -> Shape:
    """Return a shape of Qwen3-VL. Small models have tied embeddings and a small tower."""
    depth, width, inner, deepstack = (24, 1024, 4096, (5, 11, 17)) if is_small else (27, 1152, 4304, (8, 16, 24))
    return Shape(layers, hidden, heads, kv_heads, intermediate, is_small, depth, width, 16, inner, deepstack, experts=experts)


def _hybrid(value_heads: int, shape: Shape) -> Shape:
    """Return a shape of Qwen3.5. The tower of the small sizes is assumed to be Qwen3-VL's small one."""
    shape = replace(shape, vocab_size=248_320, num_base_tokens=248_044, deepstack=())
    return replace(shape, head_dim=256, mrope_section=(11, 11, 10), delta=Delta(value_heads))


TINY = Shape(4, 128, 4, 2, 256, False, 5, 64, 4, 128, (1, 2, 3), vocab_size=4096, num_base_tokens=4000, dtype="float32")
TINY_3_5 = replace(TINY, deepstack=(), mrope_section=(6, 5, 5), delta=Delta(4, 2, 64))

SHAPES: dict[str, Shape] = {
    "2B": _published(28, 2048, 16, 8, 6144, is_small=True),
    "4B": _published(36, 2560, 32, 8, 9728, is_small=True),
    "8B": _published(36, 4096, 32, 8, 12288),
    "32B": _published(64, 5120, 64, 8, 25600),
    "30B-A3B": _published(48, 2048, 32, 4, 6144, experts=Experts(128, 8, 768)),
    "235B-A22B": _published(94, 4096, 64, 4, 12288, experts=Experts(128, 8, 1536)),
    "3.5-0.8B": _hybrid(16, _published(24, 1024, 8, 2, 3584, is_small=True)),
    "3.5-2B": _hybrid(16, _published(24, 2048, 8, 2, 6144, is_small=True)),
    "3.5-4B": _hybrid(32, _published(32, 2560, 16, 4, 9216, is_small=True)),
    "3.5-9B": _hybrid(32, _published(32, 4096, 16, 4, 12288)),
    "3.5-27B": _hybrid(48, _published(64, 5120, 24, 4, 17408)),
    "3.5-35B-A3B": _hybrid(32, _published(40, 2048, 16, 2, 0, experts=Experts(256, 8, 512, 512))),
    "3.5-122B-A10B": _hybrid(64, _published(48, 3072, 32, 2, 0, experts=Experts(256, 8, 1024, 1024))),
    "3.5-397B-A17B": _hybrid(64, _published(60, 4096, 32, 2, 0, experts=Experts(512, 10, 1024, 1024))),
    # About 2 M parameters and 1 M of embeddings; a small vocabulary keeps logits and files small. float32, since tests compare tokens.
    "tiny": TINY,
    # Experts have no square matrix: transformers distinguishes the published layout from its own by the shapes.
    "tiny-moe": replace(TINY, experts=Experts(8, 2, 256)),
    "3.5-tiny": TINY_3_5,
    "3.5-tiny-moe": replace(TINY_3_5, experts=Experts(8, 2, 256, 256)),
}
