"""What each of several engines on one host gets."""

import os
import socket
from pathlib import Path

import msgspec
import pytest

from engine.launch import fleet
from engine.launch.flags import parse_args
from engine.launch.fleet import Fleet, divide
from engine.wire.config import GIB, EngineConfig, find_problems, server_environment
from models.kernels.choose import Gpu


def shares(config: EngineConfig, cpus: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[set[int]], list[EngineConfig]]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    members = divide(config, range(8001, 8001 + config.dp))
    return [set(share) for _, share in members], [own for own, _ in members]


@pytest.mark.parametrize(("dp", "cpus", "sizes"), [(2, 32, [16, 16]), (4, 6, [1, 2, 1, 2]), (3, 2, [2, 1, 1]), (8, 192, [24] * 8)])
def test_every_cpu_has_one_engine_and_every_engine_has_one(dp: int, cpus: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = shares(EngineConfig(dp=dp), cpus, monkeypatch)
    assert [len(share) for share in found] == sizes
    assert set().union(*found) == set(range(cpus)) and (cpus < dp or sum(sizes) == cpus)


def test_hyperthreads_of_a_core_go_to_one_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Linux counts the second threads of all cores after the first ones."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(fleet, "CPUS", tmp_path)
    found, _ = shares(EngineConfig(dp=2), 8, monkeypatch)
    assert found == [{0, 4, 1, 5}, {2, 6, 3, 7}]


def test_engines_get_what_was_told_but_for_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(dp=2, tp=2, host="0.0.0.0", port=8000, api_key="k", prefix_cache=False, api_arena_bytes=GIB)
    _, settings = shares(config, 4, monkeypatch)
    common = {"tp": 2, "api_key": "k", "prefix_cache": False, "api_arena_bytes": GIB}
    assert settings == [EngineConfig(**common, port=8001), EngineConfig(**common, port=8002)]
    for own in settings:
        with monkeypatch.context() as patch:
            for name, value in server_environment(own).items():
                patch.setenv(name, value)
            assert parse_args([]) == own


def test_engines_see_their_own_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_MAX_NUM_SEQS", "80")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [server_environment(EngineConfig(tp=2), index)["CUDA_VISIBLE_DEVICES"] for index in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5,3")
    assert [server_environment(EngineConfig(), index)["CUDA_VISIBLE_DEVICES"] for index in range(3)] == ["7", "GPU-5", "3"]
    assert "ENGINE_MAX_NUM_SEQS" not in server_environment(EngineConfig(), 0)
    assert server_environment(EngineConfig())["CUDA_VISIBLE_DEVICES"] == "7,GPU-5,3"


async def test_too_few_gpus_are_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        engines = Fleet(EngineConfig(dp=2, tp=2), listener)
        with pytest.raises(ValueError, match="--dp 2 with --tp 2 needs 4 GPUs; this machine has 3"):
            await engines.serve([Gpu("H200", (9, 0), 141 * GIB)] * 3)


def test_ports_behind_the_last_one_are_refused() -> None:
    config = EngineConfig(dp=4, port=65533)
    assert "--port must be at most 65531" in next(find_problems(config))
    assert not [*find_problems(msgspec.structs.replace(config, port=65531))]
