"""Scaffolded folders are what transformers, tokenizers and the engine take them for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from models.config.hub import hub_id_of, resolve
from models.config.huggingface import read_config
from models.scaffold import SHAPES, write_model_folder

SPECIAL_IDS = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|vision_start|>": 151652, "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654, "<|image_pad|>": 151655, "<|video_pad|>": 151656, "<tool_call>": 151657, "</tool_call>": 151658,
    "<think>": 151667, "</think>": 151668,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MOE = {"model_type": "qwen3_vl_moe"}


def written(folders: pytest.TempPathFactory, name: str) -> Path:
    folder = folders.mktemp(name)
    write_model_folder(folder, SHAPES[name], weights="none", seed=0)
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory, "8B")


def test_tokenizer_has_the_published_ids_and_size(published: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(published)
    assert len(tokenizer) == 151_669
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_IDS} == SPECIAL_IDS
    assert tokenizer.eos_token_id == 151_645 and tokenizer.pad_token_id == 151_643
    assert (published / "tokenizer.json").stat().st_size < 10e6


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory, "3.5-27B")


def test_the_published_ids_of_hybrids(hybrid: Path) -> None:
    config, tokenizer = read_config(hybrid), AutoTokenizer.from_pretrained(hybrid)
    assert config.eos_token_ids == (248_046, 248_044) and tokenizer.convert_tokens_to_ids("<|endoftext|>") == 248_044
    assert config.placeholder_ids == {"image": 248_056, "video": 248_057}
    assert (config.vision_start_token_id, config.vision_end_token_id) == (248_053, 248_054)
    delta = config.text.delta
    assert delta is not None and config.text.cache_spec(1, 2).bytes_per_row == 48 * delta.state_bytes(1, 2) == 153_944_064
    for name in ("Qwen3.5-27B", "Qwen3.6-35B-A3B-FP8", "Qwen3.8-27B"):
        assert hub_id_of(name) == f"Qwen/{name}"
    assert read_config(resolve("Qwen3.6-35B-A3B-FP8", "dummy", hybrid).folder).text.format == "float8"


@pytest.mark.parametrize("name", SHAPES)
def test_both_config_layouts_give_the_same_values(name: str, tmp_path: Path) -> None:
    write_model_folder(tmp_path / "a", replace(SHAPES[name], num_base_tokens=1000), weights="none", seed=0)
    AutoConfig.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")  # transformers 5 writes rope_parameters
    assert "rope_parameters" in json.loads((tmp_path / "b" / "config.json").read_text())["text_config"]
    ours, theirs = read_config(tmp_path / "a"), read_config(tmp_path / "b")
    assert ours.text == theirs.text and ours.vision == theirs.vision and ours.dtype == theirs.dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_vl_moe"}, "qwen3_vl_moe"),
        ({"model_type": "mamba"}, "mamba"),
        ({"quantization_config": {}}, "quantization_config must name quant_method"),
        *(
            ({"quantization_config": FP8 | {name: value}}, f"quantization_config.{name} must be")
            for name, value in (("weight_block_size", [64, 64]), ("weight_block_size", None), ("activation_scheme", "static"))
        ),
        ({"text_config": {"hidden_act": "gelu"}}, "hidden_act"),
        *(({"text_config": {name: True}}, name) for name in ("mlp_bias", "attention_bias", "use_sliding_window")),
        *(({"text_config": {"rope_scaling": {"rope_type": name}}}, name) for name in ("yarn", "llama3")),  # the latter without its numbers
        *(
            (
                {"text_config": {"num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2, name: value}, **MOE},
                f"{name} must be",
            )
            for name, value in {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0], "num_experts_per_tok": 9}.items()
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(published: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    config = json.loads((published / "config.json").read_text())
    for key, value in change.items():
        config[key] = config[key] | value if isinstance(value, dict) and key in config else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_sampling_defaults_and_stop_tokens_come_from_the_folder(published: Path) -> None:
    config = read_config(published)
    assert config.eos_token_ids == (151_645, 151_643)
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (0.7, 0.8, 20)


def test_registry(tmp_path: Path, published: Path) -> None:
    assert hub_id_of("Qwen3-VL-8B") == "Qwen/Qwen3-VL-8B-Instruct"
    assert hub_id_of("Qwen3-VL-2B-Thinking") == "Qwen/Qwen3-VL-2B-Thinking"
    resolved = resolve("Qwen3-VL-4B", "dummy", tmp_path)
    assert resolved.name == "Qwen3-VL-4B" and read_config(resolved.folder).text.hidden_size == 2560
    assert resolve(str(published), "auto", tmp_path).folder == published
    for alias, format in (("8B-FP8", "float8"), ("235B-A22B-Thinking-FP8", "float8"), ("30B-A3B", "plain")):
        assert read_config(resolve(f"Qwen3-VL-{alias}", "dummy", tmp_path).folder).text.format == format
    with pytest.raises(ValueError, match="nonsense"):
        resolve("nonsense", "auto", tmp_path)
