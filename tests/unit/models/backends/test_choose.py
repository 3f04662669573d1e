"""Which backend a machine gets, told from what its driver would say and what would be installed."""

from pathlib import Path

import pytest

from models.kernels import choose as module
from models.kernels.choose import Choice, Gpu, choose, suit
from models.kernels.heads import Heads, hopper_takes, portable_lack

H200 = Gpu("NVIDIA H200", (9, 0), 141 << 30)
A100 = Gpu("NVIDIA A100", (8, 0), 40 << 30)
T4 = Gpu("Tesla T4", (7, 5), 16 << 30)
ALL = frozenset({"triton", "flashinfer", "cc", "c++", "nvcc", "cuda torch"})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    there = set(ALL)
    monkeypatch.setattr(module, "find_spec", lambda name: object() if name in there else None)
    monkeypatch.setattr(module.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(module, "_torch_has_cuda", lambda: "cuda torch" in there)
    monkeypatch.setattr(module, "find_nvcc", lambda: Path("nvcc") if "nvcc" in there else None)
    return there


@pytest.mark.parametrize(
    ("gpus", "lacking", "expected"),
    [
        ([H200], set(), "hopper"),
        ([H200], {"nvcc"}, "portable"),
        ([H200], {"flashinfer"}, "portable"),
        ([H200], {"triton"}, "torch"),
        ([A100], set(), "portable"),
        ([A100], {"cc"}, "torch"),
    ],
)
def test_auto_takes_the_best_and_says_what_would_be_better(gpus: list[Gpu], lacking: set[str], expected: str, installed: set[str]) -> None:
    installed -= lacking
    choice = choose("auto", "auto", 1, False, gpus)
    assert (choice.backend, choice.device) == (expected, "cuda")
    is_best = expected == ("hopper" if gpus == [H200] else "portable")
    assert bool(choice.note) != is_best and "\n" not in choice.note


def test_without_a_gpu_the_cpu_serves(installed: set[str]) -> None:
    assert choose("auto", "auto", 2, False, []) == choose("torch", "cpu", 1, False, [H200]) == Choice("torch", "cpu")


@pytest.mark.parametrize(
    ("requested", "device", "tp", "gpus", "lacking", "words"),
    [
        ("hopper", "auto", 1, [], set(), "none was found"),
        ("portable", "cpu", 1, [H200], set(), "--device is cpu"),
        ("hopper", "auto", 1, [A100], set(), "not NVIDIA A100"),
        ("hopper", "auto", 1, [H200], {"flashinfer"}, "flashinfer-python"),
        ("portable", "auto", 1, [H200], {"triton"}, "triton"),
        ("auto", "auto", 1, [T4], set(), "7.5"),
        ("auto", "auto", 2, [H200], set(), "there is 1"),
        ("auto", "cuda", 1, [], set(), "there are none"),
        ("auto", "auto", 1, [H200], {"cuda torch"}, "built for CPUs"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(
    requested: str, device: str, tp: int, gpus: list[Gpu], lacking: set[str], words: str, installed: set[str]
) -> None:
    installed -= lacking
    with pytest.raises(ValueError, match=words) as refused:
        choose(requested, device, tp, False, gpus)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("gpus", "lacking"), [([T4], set()), ([H200], {"cuda torch"})])
def test_the_demo_is_served_on_the_cpu_where_no_gpu_can(gpus: list[Gpu], lacking: set[str], installed: set[str]) -> None:
    installed -= lacking
    choice = choose("auto", "auto", 1, True, gpus)
    assert (choice.backend, choice.device) == ("torch", "cpu") and choice.note


# Query heads, KV heads, values of a head, rotated values, whether our CUDA kernels compute the attention, whether Triton's do.
HEADS = {
    "Qwen3-VL-4B and 8B": (32, 8, 128, 128, True, True),
    "Qwen3-VL-235B-A22B": (64, 4, 128, 128, True, True),
    "Qwen3-14B": (40, 8, 128, 128, False, True),
    "Llama-3.2-1B": (32, 8, 64, 64, True, True),
    "Llama with one KV head": (32, 1, 128, 128, False, False),
    "Qwen3.5-0.8B and 2B": (8, 2, 256, 64, False, True),
    "Qwen3.5-27B": (24, 4, 256, 64, False, True),
    "heads of 80": (32, 8, 80, 80, False, False),
    "a fifth rotated": (32, 8, 128, 24, True, False),
}


def test_which_heads_each_backend_computes() -> None:
    for name, (num_queries, num_kv, dim, rotary_dim, by_hopper, by_portable) in HEADS.items():
        heads = Heads(num_queries, num_kv, dim, rotary_dim)
        assert (hopper_takes(heads), not portable_lack(heads)) == (by_hopper, by_portable), name


def test_heads_that_no_kernel_computes_are_refused_before_weights_are_read() -> None:
    odd, usual = Heads(32, 8, 80, 80), Heads(24, 8, 128, 128)
    for backend in ("hopper", "portable", "torch"):
        assert suit(Choice(backend, "cuda", "x"), backend, usual, "auto") == Choice(backend, "cuda", "x")
    for backend in ("hopper", "portable"):
        with pytest.raises(ValueError, match=f"--backend {backend} needs heads .* not 32 query heads on 8 KV heads of 80 values"):
            suit(Choice(backend, "cuda"), backend, odd, "auto")
        choice = suit(Choice(backend, "cuda"), "auto", odd, "auto")
        assert choice.backend == "torch" and backend in choice.note
    assert suit(Choice("torch", "cpu"), "auto", odd, "auto") == Choice("torch", "cpu")


@pytest.mark.parametrize("requested", ["auto", "hopper"])
def test_float32_takes_the_portable_kernels(requested: str) -> None:
    usual = Heads(32, 8, 128, 128)
    choice = suit(Choice("hopper", "cuda"), requested, usual, "float32")
    assert choice.backend == "portable" and "float32" in choice.note
    assert suit(Choice("hopper", "cuda"), requested, usual, "bfloat16") == Choice("hopper", "cuda")
