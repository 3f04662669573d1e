"""The command line: every setting is a flag with a help text, and bad values are refused by name."""

import msgspec
import pytest

from engine.config import GIB, MIB, EngineConfig, child_environment, make_parser, parse_args, parse_bytes


def test_every_field_is_a_flag_with_help() -> None:
    """Red if a setting cannot be set from the command line, or is not explained."""
    help_text = make_parser().format_help()
    for name in EngineConfig.__struct_fields__:
        assert "--" + name.replace("_", "-") in help_text
    assert parse_args([]) == msgspec.structs.replace(EngineConfig(), api_key=parse_args([]).api_key)


def test_values_arrive_typed() -> None:
    """Red if a flag's type is lost."""
    config = parse_args(["--tp", "4", "--image-cache-bytes", "1.5G", "--no-prefix-cache", "--gpu-memory-utilization", "0.5", "--port", "0"])
    assert (config.tp, config.image_cache_bytes, config.prefix_cache) == (4, int(1.5 * GIB), False)
    assert (config.gpu_memory_utilization, config.port) == (0.5, 0)
    assert parse_bytes("64M") == 64 * MIB and parse_bytes("17") == 17


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tp", "0"],
        ["--image-cache-bytes", "0"],
        ["--image-host-cache-bytes", "-1"],
        ["--max-model-len", "-1"],
        ["--media-pool-size", "0"],
        ["--prefill-tokens-per-decode-step", "-1"],
        ["--gpu-memory-utilization", "1.5"],
        ["--max-num-seqs", "9000"],
        ["--load-format", "gguf"],
        ["--block-size", "x"],
    ],
)
def test_bad_values_name_their_flag(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a bad value starts an engine, or ends it without saying which flag."""
    with pytest.raises(SystemExit) as stopped:
        parse_args(arguments)
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_the_environment_gives_an_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a key must be shown in the process list."""
    monkeypatch.setenv("ENGINE_API_KEY", "secret")
    assert parse_args([]).api_key == "secret" and parse_args(["--api-key", "other"]).api_key == "other"


def test_threads_of_children_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a token on the CPU takes 370 ms instead of 14 because two other processes want the cores, or if a user's own setting loses."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert child_environment()["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert child_environment()["OMP_WAIT_POLICY"] == "active"
