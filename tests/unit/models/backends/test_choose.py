"""Which backend a machine gets, told from what its driver would say and what would be installed."""

import pytest

from models.backends import choose as module
from models.backends.choose import Choice, Gpu, choose, list_gpus

H200 = Gpu("NVIDIA H200", (9, 0), 141 << 30)
A100 = Gpu("NVIDIA A100", (8, 0), 40 << 30)
T4 = Gpu("Tesla T4", (7, 5), 16 << 30)
ALL = frozenset({"triton", "flashinfer", "cc", "c++", "nvcc", "cuda torch"})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What the machine has; a test takes away from it."""
    there = set(ALL)
    monkeypatch.setattr(module, "find_spec", lambda name: object() if name in there else None)
    monkeypatch.setattr(module.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(module, "_torch_has_cuda", lambda: "cuda torch" in there)
    monkeypatch.setattr(module, "has_compiler", lambda: "nvcc" in there)
    return there


@pytest.mark.parametrize(
    ("gpus", "lacking", "expected"),
    [
        ([H200], set(), "hopper"),
        ([H200], {"nvcc"}, "portable"),
        ([H200], {"c++"}, "portable"),
        ([H200], {"flashinfer"}, "portable"),
        ([H200], {"triton"}, "torch"),
        ([A100], set(), "portable"),
        ([A100], {"flashinfer", "nvcc"}, "portable"),
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
        ("hopper", "auto", 1, [], set(), "there is none"),
        ("portable", "cpu", 1, [H200], set(), "--device is cpu"),
        ("hopper", "auto", 1, [A100], set(), "not NVIDIA A100"),
        ("hopper", "auto", 1, [H200], {"flashinfer"}, "flashinfer-python"),
        ("hopper", "auto", 1, [H200], {"nvcc"}, "CUDA's compiler"),
        ("portable", "auto", 1, [H200], {"triton"}, "triton"),
        ("auto", "auto", 1, [T4], set(), "7.5"),
        ("torch", "auto", 1, [T4], set(), "7.5"),
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
    """Red if the README's first command dies on a machine with a GPU that cannot be used."""
    installed -= lacking
    choice = choose("auto", "auto", 1, True, gpus)
    assert (choice.backend, choice.device) == ("torch", "cpu") and choice.note


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    assert list_gpus() == []
