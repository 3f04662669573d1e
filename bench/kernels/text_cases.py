"""Cases of the decoder: prefill of a large chunk, and decoding."""

from collections.abc import Callable, Iterator

import torch

from bench.kernels.delta_cases import delta_cases
from bench.kernels.expert_cases import BF16, EPS, expert_cases
from bench.kernels.timing import Case, copies
from engine.wire.messages import MAX_DRAFTS
from models.cache.layout import AttentionLayout
from models.cache.spec import PagedGroup
from models.config.types import ModelConfig
from models.kernels.backend import Backend
from models.kernels.ops import KVPool, NewHeads, Ops
from models.kernels.paged import AttentionBackend, allocate_pools
from models.kernels.stream import Normed, Residual, RowClass
from models.weights.matrix import Matrix

CHUNK = 8192
MIXED = 216  # tokens of a step: a chunk and decodes
PAGE = 16
POOL_BLOCKS = 16_384  # 2 GiB of keys and values in two layers

Call = Callable[[torch.Tensor, Matrix], object]


def text_cases(config: ModelConfig, backend: Backend) -> Iterator[Case]:
    """Return cases of all operations of a layer, and of the head."""
    text, ops, device = config.text, backend.ops, backend.device
    width = text.hidden_size
    norm = torch.ones(width, dtype=torch.bfloat16, device=device)
    x = torch.randn((CHUNK, width), dtype=torch.bfloat16, device=device)
    yield Case("rms norm", f"{CHUNK} x {width}", 0, 2 * x.nbytes, [lambda: ops.norm(Residual(x).normed(norm, EPS))])
    for num_tokens in (CHUNK, MIXED, 64, 1):
        yield from products(config, backend, num_tokens)
        yield from expert_cases(text, backend, num_tokens)
    if text.delta is not None:
        yield from delta_cases(text.delta, ops, device, CHUNK)
    group = PagedGroup(2, text.num_kv_heads, text.head_dim, torch.bfloat16.itemsize)
    pools = allocate_pools(group, POOL_BLOCKS, PAGE, torch.bfloat16, device)
    yield norm_rope_store(config, ops, pools[0], device)
    prefill = backend.attention(pools, text.num_heads)
    for new, context in ((CHUNK, 0), (1024, CHUNK), (3681, 25_760), (200, 28_000)):  # the last two in parts
        yield attention(config, prefill, [new], [new + context], device)
    for new, decodes in ((192, [1200] * 20), (280, [1200] * 30)):  # side by side
        yield attention(config, prefill, [new, *[1] * len(decodes)], [new + 600, *decodes], device)
    for lengths in ([1024], [384] * 64, [1200] * 32, [3800] * 16, [32_768] * 8, [20_000, *[384] * 15]):
        rows = len(lengths)
        yield attention(config, decoding(backend, pools, text.num_heads, rows), [1] * rows, lengths, device)
    for rows in (1, 16):
        for new in (1, 2, 4, 8):  # of a row that verifies drafts: up to 1.25 times the time of one token
            yield attention(config, decoding(backend, pools, text.num_heads, new * rows), [new] * rows, [1024] * rows, device)
    for new in (9, 64):
        yield attention(config, fixed(backend, pools, text.num_heads, new, 0), [new], [28_000], device)


def fixed(backend: Backend, pools: list[KVPool], num_heads: int, num_tokens: int, num_decodes: int) -> AttentionBackend:
    """Return attention as in a CUDA graph."""
    make = backend.fixed_attention(pools, num_heads, 1, max(num_decodes, 1), POOL_BLOCKS)
    assert make is not None
    return make(num_tokens, num_decodes, min(num_tokens, 1))


def decoding(backend: Backend, pools: list[KVPool], num_heads: int, num_tokens: int) -> AttentionBackend:
    """Never the kernel for one token alone, which makes its heads itself."""
    return fixed(backend, pools, num_heads, 0, max(2, num_tokens))


def products(config: ModelConfig, backend: Backend, num_tokens: int) -> Iterator[Case]:
    """The matrix products of a layer with the norms, activation and residual that go with them, the head where it is used; then those of a
    layer in float8, which tensor cores multiply twice as fast. Its "down" rounds its input, which SwiGLU does in a model."""
    device = backend.device
    for name, (rows, width, product) in layer_products(config, device, num_tokens).items():
        num_bytes, x = rows * width * BF16, torch.randn((num_tokens, width), dtype=torch.bfloat16, device=device)
        weights = [torch.randn((rows, width), dtype=torch.bfloat16, device=device) for _ in range(copies(num_bytes))]
        plain = [Matrix.of(weight, backend.name) for weight in weights]
        calls = [lambda w=w, x=x, product=product: product(x, w) for w in plain]
        shape, flops = f"{num_tokens} x {width} x {rows}", 2.0 * num_tokens * rows * width
        yield Case(name, shape, flops, num_bytes, calls)
        if name != "head":
            rounded = [Matrix.of(weight, backend.name, "float8") for weight in weights]
            calls = [lambda w=w, x=x, product=product: product(x, w) for w in rounded]
            yield Case(f"float8: {name}", shape, flops / 2, num_bytes // BF16, calls)


def layer_products(config: ModelConfig, device: torch.device, num_tokens: int) -> dict[str, tuple[int, int, Call]]:
    """(output width, input width, what is called with an input and a weight) by name."""
    text = config.text
    attended, count = text.num_heads * text.head_dim, RowClass.of(num_tokens)
    norm = torch.ones(text.hidden_size, dtype=torch.bfloat16, device=device)
    residual = torch.zeros((num_tokens, text.hidden_size), dtype=torch.bfloat16, device=device)

    def normed(x: torch.Tensor) -> Normed:
        return Residual(x).normed(norm, EPS)

    shapes: dict[str, tuple[int, int, Call]] = {
        "norm, qkv": (attended + 2 * text.num_kv_heads * text.head_dim, text.hidden_size, lambda x, w: w.product(normed(x), count)),
        "o, residual": (text.hidden_size, attended, lambda x, w: w.add_to(Residual(residual), x, count)),
    }
    if text.moe is None:
        shapes |= {
            "norm, gate and up, silu": (2 * text.intermediate_size, text.hidden_size, lambda x, w: w.swiglu(normed(x), count)),
            "down, residual": (text.hidden_size, text.intermediate_size, lambda x, w: w.add_to(Residual(residual), x, count)),
        }
    if num_tokens < CHUNK:
        shapes["head"] = text.vocab_size, text.hidden_size, lambda x, w: w.product_f32(x, count)
    return shapes


def norm_rope_store(config: ModelConfig, ops: Ops, pool: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> Case:
    text = config.text
    width = (text.num_heads + 2 * text.num_kv_heads) * text.head_dim
    qkv = torch.randn((CHUNK, width), dtype=torch.bfloat16, device=device)
    weight = torch.ones(text.head_dim, dtype=torch.bfloat16, device=device)
    tables = torch.randn((CHUNK, text.rotary_dim), device=device)
    slots = torch.arange(CHUNK, device=device)
    calls = [lambda: ops.norm_rope_store_(NewHeads(qkv, weight, weight, EPS, tables, slots), pool)]
    return Case("q/k norm, rope, store", f"{CHUNK} x {width}", 0, 2 * qkv.nbytes + tables.nbytes, calls)


def attention(config: ModelConfig, backend: AttentionBackend, new: list[int], lengths: list[int], device: torch.device) -> Case:
    """Rows of `new` query tokens each, the last ones of `lengths` cached tokens; two layers in turn, so that no cache holds the keys.

    A row of up to 1 + MAX_DRAFTS tokens is a decode row.
    """
    text = config.text
    pages = [-(-length // PAGE) for length in lengths]
    num_chunks = sum(count > 1 + MAX_DRAFTS for count in new)
    num_decodes = len(new) - num_chunks
    layout = AttentionLayout(
        qo_indptr_cpu=indptr(new),
        kv_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
        page_indptr_cpu=indptr(pages),
        pages=torch.randperm(POOL_BLOCKS, device=device)[: sum(pages)].to(torch.int32),
        slot_mapping_T=torch.zeros(sum(new), dtype=torch.int64, device=device),
        num_prefill_rows=num_chunks,
    )
    q_THK = torch.randn((sum(new), text.num_heads, text.head_dim), dtype=torch.bfloat16, device=device)
    pairs = sum(count * (length - (count - 1) / 2) for count, length in zip(new, lengths, strict=True))
    cached = 2 * sum(lengths) * text.num_kv_heads * text.head_dim * BF16
    backend.plan(layout)
    decodes = lengths[num_chunks:]
    chunk = [f"{new[0]} of {lengths[0]}"] if num_chunks else []
    shape = " + ".join([*chunk, *(f"{decodes.count(length)} x {length}" for length in dict.fromkeys(decodes))])
    name = "mixed" if num_chunks and num_decodes else "prefill" if num_chunks else "decode" if new[-1] == 1 else f"{new[-1]} tokens a row:"
    calls = [lambda layer=layer: backend.run(layer, q_THK) for layer in (0, 1)]
    return Case(f"{name} attention", shape, 4 * pairs * text.num_heads * text.head_dim, cached + 2 * q_THK.nbytes, calls)


def indptr(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
