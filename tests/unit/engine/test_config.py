"""The command line: every setting is a flag with a help text, and bad values are refused by name."""

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import serve
from engine.launch.flags import make_parser, parse_args, parse_number
from engine.wire.config import GIB, MIB, VERSION, EngineConfig, child_environment


def test_every_field_is_a_flag_with_help() -> None:
    help_text = make_parser().format_help()
    for name in EngineConfig.__struct_fields__:
        assert "--" + name.replace("_", "-") in help_text
    assert parse_args([]) == msgspec.structs.replace(EngineConfig(), api_key=parse_args([]).api_key)


def test_values_arrive_typed() -> None:
    config = parse_args(["--tp", "4", "--image-cache-bytes", "1.5G", "--no-prefix-cache", "--gpu-memory-utilization", "0.5", "--port", "0"])
    assert (config.tp, config.image_cache_bytes, config.prefix_cache) == (4, int(1.5 * GIB), False)
    assert (config.gpu_memory_utilization, config.port) == (0.5, 0)
    assert [parse_number(text) for text in ("64M", "17", "1.5g")] == [64 * MIB, 17, 1_500_000_000]


def test_bad_values_name_their_flag(capsys: pytest.CaptureFixture[str]) -> None:
    bad = "--tp 0 --image-cache-bytes 0 --max-model-len -1 --gpu-memory-utilization 1.5 --max-num-seqs 9000"
    bad += " --chat-template no-such-file --api-key-file no-such-file"
    said = refusal(shlex.split(bad), capsys)
    assert all(flag in said for flag in bad.split() if flag.startswith("--"))
    for bad, words in (
        ("--prot 1", "unknown argument --prot"), ("--dtype half", "--dtype: half is not one of auto, bfloat16"),
        ("--max-num-seqs x", "--max-num-seqs: x is not a number"), ("--tensor-parallel-size 4x", "--tp: 4x is not"),
        ("--load-format gguf", "gguf"),
    ):  # fmt: skip
        assert words in refusal(shlex.split(bad), capsys)


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_key_is_not_no_key(empty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a secret that was not filled in opens the server to everybody."""
    with pytest.raises(SystemExit):
        parse_args(["--api-key", empty])
    monkeypatch.setenv("ENGINE_API_KEY", empty)
    with pytest.raises(SystemExit):
        parse_args([])
    assert capsys.readouterr().err.count("--api-key must not be empty") == 2


def test_weight_updates_need_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (keys := tmp_path / "keys").write_text("secret")
    for given in (["--api-key", "k"], ["--api-key-file", str(keys)], ["--host", "unix:"]):
        assert parse_args(["--enable-weight-updates", *given]).enable_weight_updates
    with pytest.raises(SystemExit):
        parse_args(["--enable-weight-updates"])
    assert "--enable-weight-updates needs --api-key" in capsys.readouterr().err


def test_threads_of_children_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a token on the CPU takes 370 ms instead of 14 because two other processes want the cores, or if a user's own setting loses."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert child_environment()["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert child_environment()["OMP_WAIT_POLICY"] == "active"


def test_the_environment_sets_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "API_KEY": "a b",
        "MAX_NUM_SEQS": "3",
        "IMAGE_CACHE_BYTES": "1G",
        "PREFIX_CACHE": "False",
        "PLAN": "true",
        "SERVED_MODEL_NAME": "a,b",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"ENGINE_{name}", value)
    expected = EngineConfig(api_key="a b", max_num_seqs=3, image_cache_bytes=GIB, prefix_cache=False, plan=True, served_model_name="a,b")
    assert parse_args([]) == expected
    assert parse_args(["--max-num-seqs", "5"]) == msgspec.structs.replace(expected, max_num_seqs=5)


def test_the_model_is_the_first_word() -> None:
    assert parse_args(["Qwen3-VL-8B", "--tensor-parallel-size", "2"]).model == "Qwen3-VL-8B"
    assert parse_args(["my_model.v2", "--tensor-parallel-size", "2"]) == EngineConfig(model="my_model.v2", tp=2)
    assert not parse_args(["--no-enable-prefix-caching"]).prefix_cache
    with pytest.raises(SystemExit):
        parse_args(["x", "--model", "y"])


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse_args(arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    return said


def test_scripts_for_vllm_start_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_args([
        "--model", "m", "--trust-remote-code", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
        "--enable_prefix_caching", "--enable-chunked-prefill", "--limit-mm-per-prompt", '{"image": 4, "video": 0}',
        "--generation-config", "vllm", "--seed", "0", "-tp", "2",
        "--dtype", "float", "--max_num_seqs=4", "--allowed-origins", '["a", "b"]',
        "--disable-uvicorn-access-log", "--enable-request-id-headers",
    ])  # fmt: skip
    unused = "--enable-auto-tool-choice, --enable-chunked-prefill, --enable-request-id-headers"
    unused += ", --limit-mm-per-prompt.video, --reasoning-parser"
    note = f"engine.serve: flags without effect: {unused}, --tool-call-parser, --trust-remote-code (docs/moving.md)\n"
    assert capsys.readouterr().err == note
    assert config == EngineConfig(
        model="m", tp=2, prefix_cache=True, generation_config="vllm", seed=0, max_images_per_request=4,
        dtype="float32", max_num_seqs=4, allowed_origins="a,b", access_log=False,
    )  # fmt: skip


def test_flags_with_dots_and_of_several_words() -> None:
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--limit_mm_per_prompt.video=0 --ep 1", {}),
        ("--ep 8 --tp 8", {"ep": True, "tp": 8}),
        ("--compilation-config.mode 3 --max-num-seqs 4", {"max_num_seqs": 4}),
        ("m --served-model-name a b.c --port 80", {"model": "m", "served_model_name": "a,b.c", "port": 80}),
        ("--served-model-name=a,b --port 80 m", {"model": "m", "served_model_name": "a,b", "port": 80}),
    )
    for arguments, expected in cases:
        assert parse_args(shlex.split(arguments)) == EngineConfig(**expected), arguments


def test_scripts_for_sglang_start_as_they_are() -> None:
    config = parse_args([
        "--model-path", "m", "--mem-fraction-static", "0.5", "--context-length", "99", "--tp-size", "2", "--random-seed", "3",
        "--chunked-prefill-size", "512", "--max-running-requests", "7", "--disable-radix-cache", "--disable-cuda-graph",
        "--attention-backend", "fa3", "--enable-metrics",
    ])  # fmt: skip
    assert config == EngineConfig(
        model="m", gpu_memory_utilization=0.5, max_model_len=99, tp=2, seed=3, max_num_batched_tokens=512, max_num_seqs=7,
        prefix_cache=False, enforce_eager=True,
    )  # fmt: skip


def test_flags_of_eagle3_heads() -> None:
    flags = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "x", "--speculative-num-steps", "3"]
    assert parse_args(flags) == EngineConfig(draft="eagle3", draft_model="x")
    assert parse_args(["--speculative-config", '{"method": "eagle3", "model": "x", "num_speculative_tokens": 3}']) == parse_args(flags)
    assert parse_args(["--speculative-config.method", "mtp", "--limit-mm-per-prompt.image", "4"]) == EngineConfig(
        draft="mtp", max_images_per_request=4
    )


def test_refused_flags_name_what_to_use_instead(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, instead in (
        (["--kv-cache-dtype", "fp8_e5m2"], "not one of auto, bfloat16, fp8, fp8_e4m3"),
        (["--draft", "medusa"], "not one of off, lookup"),
        (["--limit-mm-per-prompt", "image=4"], "must be a JSON object"),
        (["--draft", "eagle3"], "needs --draft-model"),
        (["--draft-model", "x"], "--draft-model needs --draft eagle3"),
        (["--no-enable-chunked-prefill"], "--max-num-batched-tokens"),
        (["--hf-overrides.rope_scaling.factor", "2"], "edit config.json"),
        (["--max-num-seqs.image", "2"], "unknown argument --max-num-seqs.image"),
        (["--max-num-batched-tokens", "32769"], "--max-num-batched-tokens must be at most 32768"),
        (["--default-chat-template-kwargs", "[]"], "must be a JSON object"),
    ):
        said = refusal(arguments, capsys)
        assert arguments[0].partition(".")[0] in said and instead in said


RECIPES = """
Qwen/Qwen3-VL-235B-A22B-Instruct --tensor-parallel-size 8 --limit-mm-per-prompt.video 0 --mm-encoder-tp-mode data
--mm-processor-cache-type shm --async-scheduling --gpu-memory-utilization 0.95

Qwen/Qwen3-VL-235B-A22B-Instruct --tensor-parallel-size 8 --mm-encoder-tp-mode data --quantization fp8 --mm-processor-cache-type shm
--async-scheduling

Qwen/Qwen3-VL-235B-A22B-Instruct-FP8 --tensor-parallel-size 8 --mm-encoder-tp-mode data --enable-expert-parallel --async-scheduling

Qwen/Qwen3-VL-30B-A3B-Instruct --tensor-parallel-size 2 --media-io-kwargs '{"video": {"num_frames": -1}}' --host 0.0.0.0 --port 22002

Qwen/Qwen3-VL-8B-Instruct --max-model-len 32k --limit-mm-per-prompt '{"image": 4, "video": 1}' --dtype bfloat16

Qwen/Qwen3-VL-4B-Instruct --max_model_len 25.6k --max-num-seqs 64 --enable-prefix-caching --trust-remote-code --mm-processor-cache-gb 0

Qwen/Qwen3-VL-2B-Instruct --skip-mm-profiling --generation-config vllm --allowed-local-media-path / --media-io-kwargs '{"video":
{"num_frames": 32}}'

Qwen/Qwen3.5-35B-A3B --tensor-parallel-size 8 --language-model-only --reasoning-parser deepseek_r1 --enable-prefix-caching

Qwen/Qwen3.5-27B --port 8000 -tp 4 --max-model-len 262144 --reasoning-parser qwen3 --default-chat-template-kwargs '{"enable_thinking":
false}'

--model-path Qwen/Qwen3-VL-235B-A22B-Instruct-FP8 --tp 8 --ep 8 --host 0.0.0.0 --port 30000 --keep-mm-feature-on-device

--model-path Qwen/Qwen3-VL-235B-A22B-Instruct --tp 8 --ep 8 --host 0.0.0.0 --port 30000 --mm-max-concurrent-calls 4

--model-path Qwen/Qwen3.5-35B-A3B --tp-size 8 --mem-fraction-static 0.8 --context-length 262144 --reasoning-parser qwen3
--speculative-algo NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4

--model Qwen/Qwen3-VL-8B-Instruct --chunked-prefill-size 4096 --mm-attention-backend fa3 --attention-backend fa3 --cuda-graph-max-bs 64
--disable-radix-cache

--model-path Qwen/Qwen3.5-27B --mamba-scheduler-strategy extra_buffer --page-size 64 --tool-call-parser qwen3_coder

Qwen/Qwen3.5-27B -tp 2 --speculative-config.method qwen3_next_mtp --speculative-config.num_speculative_tokens 2
"""
OBSTACLES = """
Qwen/Qwen3.5-35B-A3B --tensor-parallel-size 8 --attention-backend FLASH_ATTN --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless |
--nnodes docs/scaling.md

Qwen/Qwen3-VL-8B-Instruct --rope-scaling '{"rope_type": "yarn"}' --kv-cache-dtype fp8 --max-model-len 1m | --rope-scaling
config.json
"""


def test_recipes_for_other_engines(capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a command of the peers' recipes, unedited, does not reach the plan, or does not name an obstacle."""
    for line in RECIPES.split("\n\n"):
        config = parse_args([*shlex.split(line), "--plan"])
        assert config.model in line and (config.draft == "mtp") == ("NEXTN" in line or "mtp" in line)
        assert config.ep == ("--ep 8" in line or "--enable-expert-parallel" in line)
        serve.print_plan(msgspec.structs.replace(config, gpu_memory=141 * GIB))
        assert config.model in capsys.readouterr().out
    for line in OBSTACLES.split("\n\n"):
        command, _, named = line.replace("\n", " ").partition(" | ")
        assert all(words in refusal(shlex.split(command), capsys) for words in named.split())
    lengths = [parse_args(["--max-model-len", text]).max_model_len for text in ("32k", "32K", "25.6k", "1m", "99")]
    assert lengths == [32_000, 32_768, 25_600, 1_000_000, 99]


def test_a_variable_of_no_flag_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ENGINE_MAX_NUM_SEQ", "3")
    monkeypatch.setenv("ENGINE_MAX_NUM_SEQS", "4")
    assert parse_args([]).max_num_seqs == 4 and "ENGINE_MAX_NUM_SEQ is not the variable of any flag" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out.strip() == VERSION
