"""Time products, experts and attention of a decoder against their bounds, to find regressions in a minute of GPU time.

    python -m bench kernels --size 8B --json kernels.json

The bound of a kernel is the larger of its operations and its bytes divided by rates measured on the device just before.
"""

import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path

import torch

from bench.flags import make_parser
from bench.report import table, write_result
from engine.wire.messages import MAX_PROPOSED
from models.cache.layout import AttentionLayout
from models.cache.spec import PagedGroup
from models.config.huggingface import read_config
from models.config.types import TextConfig
from models.kernels.backend import Backend
from models.kernels.make import make_backend
from models.kernels.ops import Experts, KVPool
from models.kernels.paged import AttentionBackend, allocate_pools
from models.kernels.stream import Normed, Residual, RowClass
from models.layers.moe import ALIGNED
from models.scaffold import SHAPES, write_model_folder
from models.weights.matrix import Matrix

REPLAYS = 5
L2_BYTES = 256 << 20  # total size of the inputs used in rotation, so that no cache holds them
BF16 = 2  # bytes
EPS = 1e-6
PAGE = 16
POOL_BLOCKS = 16_384  # 2 GiB of keys and values in two layers
NUM_TOKENS = (8192, 216, 64, 8, 1)  # a large chunk; a step of a chunk and decode rows; decode rows
EXPERT_TOKENS = (1, 8, 64, 512, 2048, 8192)
FORMATS = {"plain": ("", 1.0), "float8": ("float8: ", 0.5)}  # prefix of the case's name, share of bfloat16's bytes and time of operations
PREFILLS = ((8192, 0), (1024, 8192), (3681, 25_760), (200, 28_000))  # new tokens and cached ones; the last two are split
MIXED = ((192, [1200] * 20), (280, [1200] * 30))  # tokens of a prompt, cached tokens of concurrent decode rows
DECODES = ([1024], [384] * 64, [1200] * 32, [3800] * 16, [32_768] * 8, [20_000, *[384] * 15])

Call = Callable[[torch.Tensor, Matrix], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel at one shape. `calls` do the same on different data; operations and bytes that must move are those of one call."""

    name: str
    shape: str
    flops: float
    num_bytes: float
    calls: Sequence[Callable[[], object]]


def seconds_per_call(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median device time of one call, with launches hidden in a CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def ceilings(device: torch.device) -> tuple[float, float]:
    """Return the operations per second of a bfloat16 matrix product, and the bytes per second, read plus written, of `torch.neg`: a plain
    copy in a graph would run on the slower copy engines."""
    a, b = (torch.randn((8192, 8192), dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    return 2 * 8192**3 / seconds_per_call([lambda: a @ b]), 2 * source.nbytes / seconds_per_call([lambda: torch.neg(source, out=target)])


def product_cases(text: TextConfig, backend: Backend, num_tokens: int) -> Iterator[Case]:
    """Return the products of one layer in bfloat16 and float8, and the head of small steps. Only "down" in float8 includes the quantization
    of its input, which a model does in SwiGLU."""
    hidden, inner, attended = text.hidden_size, text.intermediate_size, text.num_heads * text.head_dim
    device, count = backend.device, RowClass.of(num_tokens)
    norm = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    residual = torch.zeros((num_tokens, hidden), dtype=torch.bfloat16, device=device)

    def normed(x: torch.Tensor) -> Normed:
        return Residual(x).normed(norm, EPS)

    def add(x: torch.Tensor, w: Matrix) -> None:
        w.add_to(Residual(residual), x, count)

    products: dict[str, tuple[int, int, Call]] = {  # output width, input width, call with an input and a weight
        "norm, qkv": (attended + 2 * text.num_kv_heads * text.head_dim, hidden, lambda x, w: w.product(normed(x), count)),
        "o, residual": (hidden, attended, add),
    }
    if text.moe is None:
        products["norm, gate and up, silu"] = 2 * inner, hidden, lambda x, w: w.swiglu(normed(x), count)
        products["down, residual"] = hidden, inner, add
    if num_tokens < NUM_TOKENS[0]:
        products["head"] = text.vocab_size, hidden, lambda x, w: w.product_f32(x, count)
    for name, (rows, width, call) in products.items():
        flops, num_bytes = 2.0 * num_tokens * rows * width, float(rows * width * BF16)
        x = torch.randn((num_tokens, width), dtype=torch.bfloat16, device=device)
        copies = max(1, min(16, round(L2_BYTES / num_bytes)))
        weights = [torch.randn((rows, width), dtype=torch.bfloat16, device=device) for _ in range(copies)]
        for format, (prefix, share) in FORMATS.items():
            if format == "plain" or name != "head":
                calls = [partial(call, x, Matrix.of(weight, backend.name, format)) for weight in weights]
                yield Case(f"{prefix}{name}", f"{num_tokens} x {width} x {rows}", flops * share, num_bytes * share, calls)


def expert_cases(text: TextConfig, backend: Backend) -> Iterator[Case]:
    """Return a layer's norm, router and experts in bfloat16 and float8. Bounds: uniform routing. Few tokens are several times others, so
    that no cache holds their experts."""
    if (moe := text.moe) is None:
        return
    hidden, inner, count, device = text.hidden_size, moe.intermediate_size, moe.num_experts + moe.has_shared, backend.device
    norm, chosen = torch.ones(hidden, dtype=torch.bfloat16, device=device), (moe.num_experts, moe.num_experts_per_tok, moe.has_shared)
    shapes = (moe.num_experts + ALIGNED * moe.has_shared, hidden), (count * 2 * inner, hidden), (count * hidden, inner)
    router, *values = (torch.randn(shape, dtype=torch.bfloat16, device=device) * shape[1] ** -0.5 for shape in shapes)
    for format, (prefix, share) in FORMATS.items():
        gate_up, down = (Matrix.of(each, backend.name, format, count) for each in values)
        experts = Experts(router, gate_up, down, 0, count, *chosen)
        for num_tokens in EXPERT_TOKENS:
            distinct = moe.num_experts * (1 - (1 - chosen[1] / moe.num_experts) ** num_tokens) + moe.has_shared
            flops, num_bytes = (2.0 * each * 3 * hidden * inner for each in (num_tokens * experts.num_given, distinct))
            inputs = torch.randn((max(1, round(L2_BYTES / num_bytes / share)), num_tokens, hidden), dtype=torch.bfloat16, device=device)
            normed = [Residual(x_TD).normed(norm, EPS) for x_TD in inputs]
            calls = [partial(backend.ops.sparse_swiglu, each, experts, RowClass.of(num_tokens), None) for each in normed]
            yield Case(f"{prefix}experts", f"{num_tokens} x {chosen[1]} of {count}", flops * share, num_bytes * share, calls)


def attention_cases(text: TextConfig, backend: Backend) -> Iterator[Case]:
    group = PagedGroup(2, text.num_kv_heads, text.head_dim, torch.bfloat16.itemsize)
    pools = allocate_pools(group, POOL_BLOCKS, PAGE, torch.bfloat16, backend.device)
    prefill, case = backend.attention(pools, text.num_heads), partial(attention, text, backend.device)
    for new, context in PREFILLS:
        yield case(prefill, [new], [new + context])
    for new, decodes in MIXED:
        yield case(prefill, [new, *[1] * len(decodes)], [new + 600, *decodes])
    for lengths in DECODES:
        yield case(captured(backend, pools, text, len(lengths)), [1] * len(lengths), lengths)
    for rows, new in product((1, 16), (1, 2, 4, 8)):  # rows that verify drafts take up to 1.25 times the time of one token
        yield case(captured(backend, pools, text, new * rows), [new] * rows, [1024] * rows)
    for new in (9, 64):
        yield case(prefill, [new], [28_000])


def captured(backend: Backend, pools: list[KVPool], text: TextConfig, num_decodes: int) -> AttentionBackend:
    """Return attention as in a CUDA graph, but never the single-token kernel, which also computes the heads."""
    make = backend.fixed_attention(pools, text.num_heads, max(2, num_decodes), POOL_BLOCKS)
    assert make is not None
    return make(max(2, num_decodes))


def attention(text: TextConfig, device: torch.device, backend: AttentionBackend, new: list[int], lengths: list[int]) -> Case:
    """Return a case whose row i has `new[i]` query tokens at the end of `lengths[i]` tokens. Calls use two layers in turn: no cache holds
    the keys. Up to 1 + MAX_PROPOSED tokens are a decode row."""
    pages = [-(-length // PAGE) for length in lengths]
    layout = AttentionLayout(
        qo_indptr_cpu=indptr(new),
        kv_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
        page_indptr_cpu=indptr(pages),
        pages=torch.randperm(POOL_BLOCKS, device=device)[: sum(pages)].to(torch.int32),
        slot_mapping_T=torch.zeros(sum(new), dtype=torch.int64, device=device),
        num_prefill_rows=sum(count > 1 + MAX_PROPOSED for count in new),
    )
    q_THK = torch.randn((sum(new), text.num_heads, text.head_dim), dtype=torch.bfloat16, device=device)
    cached = 2 * sum(lengths) * text.num_kv_heads * text.head_dim * BF16
    backend.plan(layout)
    rows = Counter(zip(new, lengths, strict=True))
    pairs = sum(number * count * (length - (count - 1) / 2) for (count, length), number in rows.items())
    shape = " + ".join(f"{number} x {count} of {length}" for (count, length), number in rows.items())
    calls = [partial(backend.run, layer, q_THK) for layer in (0, 1)]
    return Case("attention", shape, 4 * pairs * text.num_heads * text.head_dim, cached + 2 * q_THK.nbytes, calls)


def indptr(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@torch.inference_mode()
def main() -> None:
    parser = make_parser("kernels", __doc__, "json")
    parser.add_argument("--size", choices=list(SHAPES), default="8B")
    parser.add_argument("--backend", choices=("hopper", "portable"), default="hopper")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), SHAPES[args.size], weights="none", seed=0)
        config = read_config(Path(folder))
    backend = make_backend(args.backend, torch.device("cuda"))
    backend.load(config.text.heads(1), config.vision_head_dim)
    flops_per_s, bytes_per_s = ceilings(backend.device)
    products = chain.from_iterable(product_cases(config.text, backend, num_tokens) for num_tokens in NUM_TOKENS)
    results = []
    for case in chain(attention_cases(config.text, backend), expert_cases(config.text, backend), products):
        us, bound = 1e6 * seconds_per_call(case.calls), 1e6 * max(case.flops / flops_per_s, case.num_bytes / bytes_per_s)
        results.append((case.name, case.shape, us, bound))
    print(f"this device: {flops_per_s / 1e12:.0f} TFLOP/s in bfloat16, {bytes_per_s / 1e12:.2f} TB/s")
    rows = [[name, shape, f"{us:.1f}", f"{bound:.1f}", f"{bound / us:.0%}"] for name, shape, us, bound in results]
    print(table(["kernel", "shape", "us", "bound us", "of bound"], rows))
    write_result(args, columns=("kernel", "shape", "us", "bound_us"), kernels=results)
