"""Comparison of this GPU with plain torch at startup: a compiler or library may be wrong on an untested GPU."""

import torch

from models.cache.layout import AttentionLayout, offsets_of
from models.kernels.backend import Backend
from models.kernels.reference.attention import TorchAttention
from models.kernels.reference.varlen import TorchVarlen
from models.kernels.varlen import VarlenAttention

PAGE = 16
HEADS, KV_HEADS = 8, 2
TOKENS = (70, 1, 1)  # a chunk and two decode rows
LENGTHS = (90, 300, 33)
PATCHES = (48, 48, 20)
TOLERANCE = 2e-2


def check_kernels(backend: Backend, text_head_dim: int, vision_head_dim: int) -> None:
    """RuntimeError, in one line, if attention is wrong."""
    generator = torch.Generator(backend.device).manual_seed(0)
    for name, error in (
        ("attention of the decoder", _paged_error(backend, text_head_dim, generator)),
        ("attention of the vision tower", _varlen_error(backend, vision_head_dim, generator) if vision_head_dim else 0.0),
    ):
        if not error < TOLERANCE:
            raise RuntimeError(f"the {name} is wrong on this GPU (relative error {error:.2g}): --backend torch is slow but correct")


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).bfloat16()


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def _paged_error(backend: Backend, head_dim: int, generator: torch.Generator) -> float:
    lengths, tokens = torch.tensor(LENGTHS), torch.tensor(TOKENS)
    num_pages = -(-lengths // PAGE)
    total = int(num_pages.sum())
    pool = tuple(_random(generator, total, PAGE, KV_HEADS, head_dim) for _ in range(2))
    layout = AttentionLayout(
        qo_indptr_cpu=offsets_of(tokens.numpy()),
        kv_lens_cpu=lengths.int(),
        page_indptr_cpu=offsets_of(num_pages.numpy()),
        pages=torch.randperm(total, generator=torch.Generator().manual_seed(1)).int().to(backend.device),
        slot_mapping_T=torch.zeros(sum(TOKENS), dtype=torch.int64, device=backend.device),
        num_prefill_rows=1,
    )
    q_THK = _random(generator, sum(TOKENS), HEADS, head_dim)
    results: list[torch.Tensor] = []
    for attention in (backend.attention([(pool[0], pool[1])], HEADS), TorchAttention([(pool[0].float(), pool[1].float())])):
        attention.plan(layout)
        results.append(attention.run(0, q_THK if not results else q_THK.float()))
    return _relative(*results)


def _varlen_error(backend: Backend, head_dim: int, generator: torch.Generator) -> float:
    kvq = _random(generator, sum(PATCHES), 3, 16, head_dim)
    angles = torch.rand((sum(PATCHES), head_dim // 2), generator=generator, device=backend.device)
    tables = torch.cat((angles.cos(), angles.sin()), dim=-1)
    results: list[torch.Tensor] = []
    both: tuple[VarlenAttention, ...] = backend.varlen_attention(16, head_dim), TorchVarlen()
    for attention in both:
        attention.plan(PATCHES)
        results.append(attention.run(kvq.clone() if not results else kvq.float(), tables))
    return _relative(*results)
