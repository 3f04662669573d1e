"""The command line: every setting is a flag with a help text, and bad values are refused by name."""

from pathlib import Path

import msgspec
import pytest

from engine.config import GIB, MIB, VERSION, EngineConfig, child_environment
from engine.flags import make_parser, parse_args, parse_bytes


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
        ["--draft", "auto"],
        ["--block-size", "x"],
        ["--chat-template", "no-such-file"],
        ["--ssl-certfile", "no-such-file"],
    ],
)
def test_bad_values_name_their_flag(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a bad value starts an engine, or ends it without saying which flag."""
    with pytest.raises(SystemExit) as stopped:
        parse_args(arguments)
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_key_is_not_no_key(empty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a secret that was not filled in opens the server to everybody."""
    with pytest.raises(SystemExit):
        parse_args(["--api-key", empty])
    monkeypatch.setenv("ENGINE_API_KEY", empty)
    with pytest.raises(SystemExit):
        parse_args([])
    assert capsys.readouterr().err.count("--api-key must not be empty") == 2


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


def test_where_values_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a file, the environment or the command line loses against what it must beat, or if one of them reads values otherwise."""
    file = tmp_path / "engine.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nimage-cache-bytes: 1G\nprefix-cache: false\naccess-log: false\nmodel: a\n")
    monkeypatch.setenv("ENGINE_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("ENGINE_ACCESS_LOG", "true")
    config = parse_args(["--config", str(file), "--port", "5"])
    assert (config.port, config.max_num_seqs, config.image_cache_bytes) == (5, 3, GIB)
    assert (config.prefix_cache, config.access_log, config.model) == (False, True, "a")
    file.write_text("prot: 1\n")
    with pytest.raises(SystemExit):
        parse_args(["--config", str(file)])


def test_the_model_is_the_first_word() -> None:
    """Red if the model cannot be named without its flag, or if one of two names is dropped."""
    assert parse_args(["Qwen3-VL-8B", "--tensor-parallel-size", "2"]).model == "Qwen3-VL-8B"
    assert parse_args(["x", "--tensor-parallel-size", "2"]).tp == 2
    with pytest.raises(SystemExit):
        parse_args(["x", "--model", "y"])


TYPOS = [("--prot", "--port"), ("--max-num-seq=4", "--max-num-seqs"), ("--image-cache-byte", "--image-cache-bytes")]


@pytest.mark.parametrize(("typo", "meant"), TYPOS)
def test_a_typo_is_one_line_with_the_nearest_flag(typo: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a typo is answered by a page of usage, or taken for an abbreviation."""
    with pytest.raises(SystemExit) as stopped:
        parse_args([typo, "1"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 and f"did you mean {meant}?" in said


def test_sizes_and_counts_are_told_apart() -> None:
    """Red if help does not say which flag takes a suffix, or if a count takes one."""
    text = make_parser().format_help()
    assert "--image-cache-bytes SIZE" in text and "--tp N" in text and "scheduling:" in text
    with pytest.raises(SystemExit):
        parse_args(["--tp", "4K"])


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out.strip() == VERSION
