"""Every Triton kernel of the portable backend compiled for every generation of GPUs that it serves, without one: Triton compiles for a
target, and its package has ptxas."""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.wire.params import SamplingParams
from engine.worker.sampling.samples import samples_of
from models.config.formats import MatrixFormat
from models.kernels.ops import NewHeads
from models.kernels.stream import Normed
from models.weights.float8 import BlockScaled, GroupScaled
from models.weights.matrix import Matrix, Place

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # CUDA's programming guide
FLOAT8_FROM = 89
SPECIALISED = {  # integers of a model, or of a kernel that has one token
    ("_route", "first"),
    ("_route", "num_experts"),
    ("_rms_norm", "addend_size"),  # tokens times the width, which is a multiple of 16
    *((name, "stride") for name in ("_norm_rope_store", "_convolve", "_keep", "_gated_norm", "_gate")),
    *((name, "row_stride") for name in ("_convolve", "_keep", "_step", "_scan")),
    ("_step", "kept_stride"),
    ("_expand", "stride"),
}
LAUNCHED = re.compile(r"\b(_\w+)\[[^\n]*?\]\(")  # kernel[grid](
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass
class Launch:
    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def compile(self, capability: int) -> Any:
        import triton
        from triton.backends.compiler import GPUTarget

        names = self.kernel.arg_names
        bound = dict(zip(names, self.arguments, strict=False)) | {k: v for k, v in self.options.items() if k in names}
        ones = {p.name for p in self.kernel.params if not p.do_not_specialize and type(bound[p.name]) is int and bound[p.name] == 1}
        constants = {name: bound[name] for name in names if name.isupper() or name in ones}  # Triton takes a 1 for a constant
        signature = {name: "constexpr" if name in constants else type_of(bound[name]) for name in names}
        source = triton.compiler.ASTSource(self.kernel, signature, constants)
        options = {key: self.options[key] for key in ("num_warps", "num_stages") if key in self.options}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def type_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(type_of, value))
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    from models.kernels.triton.launch import Kernel

    recorded: list[Launch] = []

    def launcher(kernel: Kernel, grid: Any) -> Any:
        return lambda *arguments, **options: recorded.append(Launch(kernel.jitted, arguments, options))

    monkeypatch.setattr(Kernel, "__getitem__", launcher)
    yield recorded


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def launch_text() -> None:
    from models.kernels.triton import activations, gemv, text

    pool = bf16(4, 16, 8, 128), bf16(4, 16, 8, 128)
    norm = bf16(4096), 1e-6
    activations.values_of(Normed(bf16(2, 4096), torch.zeros(2, 2, 4096), *norm))
    text.swiglu(bf16(2, 24_576))
    slots = torch.zeros(2, dtype=torch.int64)
    text.norm_rope_store(NewHeads(bf16(2, 48 * 128), bf16(128), bf16(128), 1e-6, torch.zeros(2, 128), slots), pool)
    text.norm_rope_store(NewHeads(bf16(2, 48 * 128), None, None, 0.0, torch.zeros(2, 128), slots), pool)
    text.rotary_rows(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(64, dtype=torch.int64), torch.zeros(64))
    gemv.gemv(bf16(1, 4096), bf16(6144, 4096), bf16(1, 6144), norm)
    gemv.gemv(bf16(1, 4096), bf16(128, 4096), bf16(1, 128), norm, normed_1D=bf16(1, 4096))
    gemv.gemv(bf16(1, 4096), bf16(24_576, 4096), bf16(1, 12_288), norm, gated=True)
    gemv.gemv(bf16(1, 12_288), bf16(4096, 12_288), bf16(1, 4096), adds=True)


def launch_tower() -> None:
    from models.kernels.ops import Taps
    from models.kernels.triton import pixels, tower

    tower.rotate_(bf16(64, 3, 16, 72), torch.zeros(64, 72))
    tower.layer_norm(bf16(64, 1152), torch.zeros(1152), bf16(1152), bf16(1152), 1e-6)
    tower.layer_norm(bf16(16, 4608), torch.zeros(1152), bf16(4608), bf16(4608), 1e-6)
    image = torch.zeros((64, 64, 3), dtype=torch.uint8)
    taps = Taps(torch.zeros(32, dtype=torch.int32), torch.zeros(32, 8, dtype=torch.int32))
    pixels.resample(image, 0, taps)
    pixels.resample_to_patches_(image[:32].contiguous(), 1, taps, 16, 2, bf16(4, 768))


def launch_float8() -> None:
    from models.kernels.triton import activations, float8, text

    activations.rounded(norm := Normed(bf16(2, 4096), None, bf16(4096), 1e-6))
    activations.inputs_of_experts(norm, True, torch.zeros(128, dtype=torch.int32))
    text.swiglu_quantized(bf16(2, 24_576))
    text.quantized(bf16(2, 4096))
    for num_tokens, rows in ((1, 128), (1, 256), (100, 256), (1000, 256)):
        x, weight = GroupScaled.empty(num_tokens, 4096, torch.device("cpu")), BlockScaled.empty(rows, 4096, torch.device("cpu"))
        float8.multiply(x, weight)
        if num_tokens <= float8.MOST_TOKENS:
            float8.multiply_in_parts(x, weight, torch.empty)


def launch_experts(capability: int, is_float8: bool) -> None:
    from models.kernels.ops import Experts
    from models.kernels.triton import moe, routing
    from models.kernels.triton.products import triton_products

    def matrix(rows: int, columns: int) -> Matrix:
        format = "float8" if is_float8 else "plain"
        return Matrix.empty(rows, columns, MatrixFormat(format, format), Place("portable", torch.device("cpu"), torch.bfloat16), 128)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "capability_of", lambda _: (capability // 10, capability % 10))
        experts = Experts(bf16(128, 512), matrix(128 * 2 * 768, 512), matrix(128 * 512, 768), 0, 128, 128, 8)
        gate_up, down, counts = triton_products(experts.gate_up), triton_products(experts.down), torch.zeros(128, dtype=torch.int32)
        for num_tokens in (8, 30, 100, 300, 1000, 2000):  # per choice, per expert, each of the tiles
            real = torch.ones(num_tokens, dtype=torch.bool) if num_tokens == 1000 else None
            gate_up.sparse_swiglu(bf16(num_tokens, 512), bf16(1, num_tokens, 128), counts, experts, real, bf16)
        routing.route(bf16(1, 1, 144), replace(experts, has_shared=True), None)
        routing.route(torch.zeros(8, 1, 128), experts, None)
        choices = routing.route(bf16(1, 1, 128), experts, None)
        if not is_float8:
            inner = gate_up.expert_swiglu(bf16(1, 512), choices.experts_TK[0])
            down.expert_sum(inner, choices.experts_TK[0], choices.weights_TK[0], bf16(1, 512), adds=True)


def launch_low_bit() -> None:
    """Launch the kernels around the products of a library."""
    from models.kernels.ops import Experts
    from models.kernels.triton import moe, routing

    nothing = Matrix.of(bf16(1, 2048), "portable")
    stacked = Experts(bf16(128, 2048), nothing, nothing, 0, 128, 128, 8)
    choices = routing.route(bf16(1, 64, 128), stacked, None, counts_E=torch.zeros(128, dtype=torch.int32))
    routing.sort(choices, 24, is_filled=True)
    moe.weighted_sum(bf16(64 * 8, 2048), choices.experts_TK, choices.weights_TK, bf16(64, 2048), adds=False)


def launch_exchange() -> None:
    from models.kernels.triton.exchange import TritonExchange

    exchange = TritonExchange(1, [torch.zeros(1, dtype=torch.int64)] * 4, torch.device("cpu"))
    exchange._ranks["NAPS"] = True
    exchange.add_sum_(bf16(2, 4096), torch.zeros(8, 2, 4096))
    exchange.sum_(bf16(2, 4096))
    exchange.sum_(bf16(1, 2))  # as `check` does at every start
    exchange.gather_columns(torch.zeros(2, 37_984))
    exchange.broadcast_(torch.zeros(2, dtype=torch.int64))
    exchange.broadcast_(torch.zeros(1, dtype=torch.int32))


def launch_sampling() -> None:
    from models.kernels.triton.sampling import TritonSampling

    vocab_size = 151_936
    logits = torch.zeros((2, vocab_size))
    index, sampling = torch.zeros(2, dtype=torch.int64), TritonSampling(2, vocab_size, torch.device("cpu"))
    sampling.penalise_(logits, index, torch.zeros_like(logits, dtype=torch.int32), index, torch.zeros(2, 3))
    sampling.mask_(logits, index, torch.zeros((2, vocab_size // 32), dtype=torch.int32))
    sampling.sample(logits, samples_of([SamplingParams(top_k=20)] * 2, [0, 1], sampling.max_top_k, torch.device("cpu")).params)


def launch_attention(capability: int) -> None:
    from models.kernels.triton.paged_attention import copy_pages, eager_attention
    from models.kernels.triton.text import norm_rope_store
    from models.kernels.triton.tuned import attention_tiles
    from tests.unit.models.backends.hopper.attention_step import Step

    for heads, head_dim in (((32, 8), 128), ((24, 4), 256)):
        step = Step.build([300, 5000], heads, head_dim, tokens=[200, 1]).to(torch.device("cpu"), torch.bfloat16)
        rounded = tuple(each.to(torch.float8_e4m3fn) for each in step.pool)
        if capability >= FLOAT8_FROM:
            qkv, slots = bf16(2, (heads[0] + 2 * heads[1]) * head_dim), torch.zeros(2, dtype=torch.int64)
            norm_rope_store(NewHeads(qkv, bf16(head_dim), bf16(head_dim), 1e-6, torch.zeros(2, 64), slots, (0.5, 2.0)), rounded)
            copy_pages(rounded, step.pool, step.layout.pages)
        for pool in (step.pool, rounded) if capability >= FLOAT8_FROM else (step.pool,):
            attention = eager_attention([pool], heads[0], attention_tiles((capability // 10, capability % 10), head_dim))
            attention.plan(replace(step.layout, num_prefill_rows=1))
            attention.run(0, step.q)


def launch_hybrid() -> None:
    from models.kernels.ops import DeltaHeads, DeltaState, StateRows
    from models.kernels.triton import activations, delta, text

    pool, slots = (bf16(4, 16, 4, 256), bf16(4, 16, 4, 256)), torch.zeros(2, dtype=torch.int64)
    text.norm_rope_store(
        NewHeads(bf16(2, 56 * 256)[:, : 32 * 256], torch.zeros(256), torch.zeros(256), 1e-6, torch.zeros(2, 64), slots), pool
    )
    activations.values_of(Normed(bf16(2, 5120), bf16(2, 2, 5120), torch.zeros(5120), 1e-6))
    text.gate(bf16(2, 24 * 256), bf16(2, 24 * 256))
    text.gate(bf16(2, 512), bf16(2, 1))
    weights = bf16(10_240, 4), torch.zeros(48), torch.zeros(48), bf16(128)
    stored = torch.zeros((3, 4 * 48 * 128**2 + 2 * (17 * 10_240 + 7 * 96)), dtype=torch.uint8)
    state = DeltaState.of(stored, torch.zeros(3, dtype=torch.int64), (48, 128, 128), weights[0], 7)
    for num_tokens in (3, 100):
        heads = DeltaHeads(bf16(num_tokens, 16_384), bf16(num_tokens, 96), *weights, 1e-6, 16, 128)
        starts = torch.tensor([0, num_tokens - 1, num_tokens], dtype=torch.int32)
        delta.delta_rule(heads, state, StateRows(torch.arange(2), starts, 1))


def launch_lora() -> None:
    from models.kernels.triton.lora import TritonLowRank
    from models.lora.low_rank import TokenSlots, make_low_rank

    ranges = (0, 4096, 0), (4096, 5120, 1), (5120, 6144, 2)
    low_rank = make_low_rank(4, 64, 4096, ranges, torch.device("cpu"), torch.bfloat16)
    for num_tokens in (1, 64, 2000):
        out_TN = bf16(num_tokens, 6144) if num_tokens > 1 else torch.zeros(1, 6144)
        slots = TokenSlots(torch.zeros(num_tokens, dtype=torch.int32))
        TritonLowRank().expand_(out_TN, TritonLowRank().shrink(bf16(num_tokens, 4096), low_rank, slots), low_rank, slots)
    halves = make_low_rank(4, 64, 4096, ((0, 12_288, 0), (12_288, 24_576, 1)), torch.device("cpu"), torch.bfloat16)
    for num_tokens in (1, 64, 2000):
        slots, gate_up_TN = TokenSlots(torch.zeros(num_tokens, dtype=torch.int32)), bf16(num_tokens, 24_576)
        TritonLowRank().expand_swiglu(gate_up_TN, TritonLowRank().shrink(bf16(num_tokens, 4096), halves, slots), halves, slots)


def launch_transfers() -> None:
    from models.kernels.triton.transfers import TritonTransfers

    TritonTransfers(torch.device("cpu"))


def launch_all(capability: int) -> None:
    launch_text()
    launch_transfers()
    launch_tower()
    launch_sampling()
    launch_exchange()
    launch_attention(capability)
    launch_hybrid()
    launch_lora()
    launch_experts(capability, is_float8=False)
    launch_low_bit()
    if capability >= FLOAT8_FROM:
        launch_float8()
        launch_experts(capability, is_float8=True)


@pytest.mark.compile
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(capability: int, launches: list[Launch]) -> None:
    launch_all(capability)
    for launch in launches:
        launch.options["OVERLAP"] = capability >= 90
        compiled = launch.compile(capability)
        assert compiled.metadata.shared <= SHARED_BYTES[capability], launch.name
        assert len(compiled.asm["cubin"]) and f".target sm_{capability}" in compiled.asm["ptx"], launch.name
        assert ("griddepcontrol" in compiled.asm["ptx"]) <= (capability >= 90), launch.name


@pytest.mark.compile
def test_what_is_compiled_in_advance_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    from models.kernels.compiling import compiling
    from models.kernels.triton.launch import Kernel

    device = {"device": lambda: 0, "stream": lambda _: 0, "target": lambda: GPUTarget("cuda", 90, 32)}
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(**{f"get_current_{name}": get for name, get in device.items()}))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    with compiling(torch.device("cpu")):
        launch_hybrid()
    versions: dict[Any, set[Any]] = {}

    def launch(kernel: Kernel, grid: Any, *arguments: Any, **options: Any) -> None:
        options |= {"OVERLAP": False} if "OVERLAP" in kernel.jitted.arg_names else {}
        found = versions.setdefault(kernel, set(kernel.jitted.device_caches[0][0]))
        kernel.jitted.run(*arguments, grid=grid, warmup=True, **options)
        assert found == set(kernel.jitted.device_caches[0][0]), kernel.jitted

    monkeypatch.setattr(Kernel, "_launch", launch)
    launch_hybrid()
    assert versions


def test_every_kernel_is_here(launches: list[Launch]) -> None:
    from models.kernels.triton import launch

    launch_all(90)
    sources = Path(launch.__file__).parent.glob("*.py")
    assert {each.name for each in launches} == {name for path in sources for name in LAUNCHED.findall(path.read_text())}


def test_no_kernel_is_compiled_for_a_number_of_tokens(launches: list[Launch]) -> None:
    """Neither for the number itself nor for the alignment of what is behind so many values."""
    launch_all(90)
    specialised, unaligned = set(), set()
    for launch in launches:
        bound = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.options
        of_kernel = [p for p in launch.kernel.params if not p.name.isupper() and not p.do_not_specialize]
        specialised |= {(launch.name, p.name) for p in of_kernel if type(bound[p.name]) is int}
        tensors = [p.name for p in of_kernel if isinstance(bound[p.name], torch.Tensor) and not p.do_not_specialize_on_alignment]
        unaligned |= {(launch.name, name) for name in tensors if bound[name].data_ptr() % 16}
    assert not unaligned
    assert specialised == SPECIALISED
