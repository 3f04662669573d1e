"""Reader of a checkpoint folder's JSON files in the layouts of transformers 5 (`rope_parameters`) and of the published checkpoints
(`rope_scaling`, `rope_theta`). An entry that is null counts as missing. Imports no torch."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.config.formats import FORMATS, read_quantization
from models.config.registry import MIXTURES, Architecture, architecture_of
from models.config.schemes import Quantization
from models.config.types import (
    MEDIA_KINDS,
    DeltaConfig,
    Eagle3Config,
    MediaKind,
    ModelConfig,
    MoeConfig,
    SamplingDefaults,
    TextConfig,
    VisionConfig,
)
from models.media.geometry import VisionGeometry

Json = Mapping[str, Any]

# Values of the published checkpoints, for folders without preprocessor_config.json.
DEFAULT_MIN_PIXELS = 65_536
DEFAULT_MAX_PIXELS = 16_777_216
MAX_SIZE = 1 << 24  # of a model's dimensions
UNREAD = r"\.(weight_shape|g_idx|input_scale|input_global_scale|[kv]_scale)$"  # ignored tensors: redundant, or for inputs
LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
VISION_SIZES = (  # with the same names in `VisionConfig`
    "depth", "hidden_size", "num_heads", "intermediate_size", "in_channels", "patch_size", "temporal_patch_size", "out_hidden_size",
    "num_position_embeddings",
)  # fmt: skip


def read_config(folder: Path, with_head: bool = False, eagle3: str = "") -> ModelConfig:
    """Read config.json, generation_config.json and preprocessor_config.json. ValueError names unsupported or missing values.
    `with_head`: also read the prediction head. `eagle3`: the folder of an EAGLE-3 head, if there is one."""
    try:
        model = _read(folder, with_head)
        if eagle3:
            folder = Path(eagle3)
            model = replace(
                model, text=replace(model.text, eagle3=_eagle3(read_json(folder / "config.json", is_required=True), model.text))
            )
        return model
    except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, re.error) as problem:
        raise ValueError(f"{folder.name}: a JSON file has a value of an unexpected type or size ({problem})") from problem


def _read(folder: Path, with_head: bool) -> ModelConfig:
    config = read_json(folder / "config.json", is_required=True)
    architecture = architecture_of(config)
    text = _value(config, "text_config") if architecture.has_tower else config
    num_layers = text.get("mtp_num_hidden_layers", 0)
    if with_head and (num_layers != 1 or text.get("mtp_use_dedicated_embeddings")):
        words = f"no prediction head of one layer with the model's embeddings (mtp_num_hidden_layers: {num_layers})"
        raise ValueError(f"this checkpoint has {words}: choose another method of speculative decoding")
    _reject_unsupported(text, str(config["model_type"]))
    generation = read_json(folder / "generation_config.json")
    vision = _vision(_value(config, "vision_config")) if architecture.has_tower else None
    quantization = config.get("quantization_config")
    quantized = read_quantization(quantization)
    for rule in quantized.rules:
        re.compile(rule.pattern)
    plain = [name for key in ("modules_to_not_convert", "ignored_layers") for name in (quantization or {}).get(key, ()) if name]
    plain_modules = tuple(architecture.known_name(f"{name}.").rstrip(".") for name in plain)
    decoder = _text(text, has_tower=vision is not None, head_path=architecture.head if with_head else "")
    decoder = replace(decoder, format=quantized.format, rules=quantized.rules, plain_modules=plain_modules)
    for module in ("lm_head", "visual.blocks.0.attn.qkv") if quantized.is_of_all else ():
        if (found := decoder.stored_format(module)) != "plain":
            raise ValueError(f"quantization_config must ignore {module.partition('.')[0]}, whose matrices would have the format {found}")
    both = {**text, **config}
    return ModelConfig(
        text=decoder,
        vision=vision,
        architecture=_as_stored(architecture, with_head, quantized),
        geometry=_geometry(read_json(folder / "preprocessor_config.json"), vision),
        sampling=_sampling(generation),
        dtype=str(both.get("dtype", both.get("torch_dtype", "bfloat16"))),
        tie_word_embeddings=both.get("tie_word_embeddings", False),
        placeholder_ids={} if vision is None else _placeholder_ids(config),
        vision_start_token_id=-1 if vision is None else _value(config, "vision_start_token_id"),
        vision_end_token_id=-1 if vision is None else _value(config, "vision_end_token_id"),
        eos_token_ids=_all_ids(generation, config, text),
    )


def _as_stored(architecture: Architecture, with_head: bool, quantized: Quantization) -> Architecture:
    """Return the architecture with the quantization's renamed tensors, and without stored tensors that are not read."""
    head = rf"^{architecture.head}\." if architecture.head and not with_head else ""
    inputs = UNREAD if quantized.renames or quantized.format not in FORMATS else ""
    dropped = "|".join(filter(None, (architecture.dropped, head, inputs)))
    return replace(architecture, renames=architecture.renames + quantized.renames, dropped=dropped)


def read_json(path: Path, is_required: bool = False) -> dict[str, Any]:
    """Return the file's object without entries that are null; {} if there is no file, unless it `is_required`."""
    if not path.is_file():
        if is_required:
            raise ValueError(f"{path.parent} is not a model folder: it has no {path.name}")
        return {}
    text = path.read_text(encoding="utf-8")
    loaded = json.loads(text, object_pairs_hook=lambda pairs: {name: value for name, value in pairs if value is not None})
    if not isinstance(loaded, dict):
        raise ValueError(f"{path.name} must hold a JSON object")
    return loaded


def _value(config: Json, name: str) -> Any:
    if name not in config:
        raise ValueError(f"config.json has no {name}")
    return config[name]


def _size(config: Json, name: str) -> int:
    if type(value := _value(config, name)) is not int or not 0 < value < MAX_SIZE:
        raise ValueError(f"{name} in config.json must be a whole number from 1 to {MAX_SIZE - 1}, got {str(value)[:100]}")
    return value


def _all_ids(*sources: Json) -> tuple[int, ...]:
    """Return the end tokens of all files: a generation may end with another one than a text."""
    found = [source.get("eos_token_id", ()) for source in sources]
    return tuple(dict.fromkeys(token_id for value in found for token_id in ([value] if isinstance(value, int) else value)))


def _reject_unsupported(text: Json, model_type: str) -> None:
    if (model_type in MIXTURES) != bool(_num_experts(text)):
        raise ValueError(f"text_config.num_experts is not valid for model_type {model_type!r}")
    for name, supported in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("norm_topk_prob", True),
        ("decoder_sparse_step", 1),
        ("mlp_only_layers", []),
        ("attn_output_gate", _is_hybrid(text)),
        ("mamba_ssm_dtype", "float32"),
    ):
        if (found := text.get(name, supported)) != supported:
            raise ValueError(f"text_config.{name} must be {supported!r}, got {found!r}")


def _text(config: Json, has_tower: bool, head_path: str) -> TextConfig:
    moe, (delta, delta_layers) = _moe(config), _delta(config)
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    head_dim = _size(config, "head_dim") if has_tower else config.get("head_dim", hidden_size // num_heads)
    rope = _rotary(config, default_theta=5_000_000.0 if has_tower else 10_000.0)
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 0.25 if delta else 1.0))
    published = (11, 11, 10) if delta else (24, 20, 20)
    section = tuple(rope.get("mrope_section", published)) if has_tower else (head_dim // 2, 0, 0)  # one axis
    if len(section) != 3 or sum(section) != rotary_dim // 2:
        raise ValueError(f"mrope_section must be three numbers that sum to half of the rotary values ({rotary_dim}), got {section}")
    return TextConfig(
        num_layers=_size(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads") if has_tower else config.get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=_size(config, "intermediate_size") if moe is None else config.get("intermediate_size", 0),  # 0: of no layer
        vocab_size=_size(config, "vocab_size"),
        rms_norm_eps=float(_value(config, "rms_norm_eps")),
        rope_theta=float(rope["rope_theta"]),
        rotary_dim=rotary_dim,
        mrope_section=section,
        max_position_embeddings=_size(config, "max_position_embeddings"),
        llama3=rope["llama3"],
        has_qk_norm=config.get("model_type") != "llama",
        moe=moe,
        delta=delta,
        delta_layers=delta_layers,
        head_path=head_path,
    )


def _rotary(config: Json, default_theta: float) -> dict[str, Any]:
    """Return the rotary parameters, always with `rope_theta` and `llama3` (empty: unscaled). ValueError for other scalings."""
    entries = {name: config[name] for name in ("rope_theta", "partial_rotary_factor", "mrope_section") if name in config}
    rope = {"rope_theta": default_theta, **entries, **config.get("rope_parameters", config.get("rope_scaling", {}))}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"rope_type must be 'default' or 'llama3', got {rope_type!r}")
    if rope_type == "llama3" and not rope.keys() >= set(LLAMA3):
        raise ValueError(f"rope_type 'llama3' must come with {', '.join(LLAMA3)}")
    rope["llama3"] = tuple(float(rope[name]) for name in LLAMA3) if rope_type == "llama3" else ()
    return rope


def _is_hybrid(config: Json) -> bool:
    return "linear_num_value_heads" in config


def _delta(config: Json) -> tuple[DeltaConfig | None, frozenset[int]]:
    """Return DeltaNet and its layers: by `layer_types`, or else all but every n-th. ValueError unless some layers have attention."""
    if not _is_hybrid(config):
        return None, frozenset()
    delta = DeltaConfig(
        num_key_heads=_size(config, "linear_num_key_heads"),
        num_value_heads=_size(config, "linear_num_value_heads"),
        key_dim=_size(config, "linear_key_head_dim"),
        value_dim=_size(config, "linear_value_head_dim"),
        kernel_size=_size(config, "linear_conv_kernel_dim"),
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise ValueError(f"linear_num_value_heads must be a multiple of linear_num_key_heads, got {delta}")
    num_layers, interval = _size(config, "num_hidden_layers"), config.get("full_attention_interval", 4)
    regular = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers)]
    kinds = config.get("layer_types", regular)
    if len(kinds) != num_layers or set(kinds) != {"linear_attention", "full_attention"}:
        raise ValueError("text_config.layer_types must name linear_attention or full_attention for every layer, and each at least once")
    return delta, frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention")


def _num_experts(config: Json) -> int:
    return int(config.get("num_experts", config.get("num_local_experts", 0)))  # transformers 5 writes the latter


def _moe(config: Json) -> MoeConfig | None:
    if not _num_experts(config):
        return None
    size, shared_size = _size(config, "moe_intermediate_size"), config.get("shared_expert_intermediate_size", 0)
    if shared_size not in (0, size):
        raise ValueError(f"shared_expert_intermediate_size must be moe_intermediate_size ({size}), as in every published model")
    moe = MoeConfig(_num_experts(config), _size(config, "num_experts_per_tok"), size, shared_size > 0)
    if not 0 < moe.num_experts_per_tok <= moe.num_experts:
        raise ValueError(f"num_experts_per_tok must be 1 to num_experts ({moe.num_experts}), got {moe.num_experts_per_tok}")
    return moe


def _vision(config: Json) -> VisionConfig:
    if (found := config.get("hidden_act", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise ValueError(f"vision_config.hidden_act must be 'gelu_pytorch_tanh', got {found!r}")
    return VisionConfig(
        **{name: _size(config, name) for name in VISION_SIZES},
        merge_size=_size(config, "spatial_merge_size"),
        deepstack_indexes=tuple(config.get("deepstack_visual_indexes", ())),
        rope_theta=float(config.get("rope_parameters", {}).get("rope_theta", 10_000.0)),
    )


def _placeholder_ids(config: Json) -> dict[MediaKind, int]:
    _value(config, "image_token_id")
    return {kind: config[f"{kind}_token_id"] for kind in MEDIA_KINDS if f"{kind}_token_id" in config}


def _geometry(settings: Json, vision: VisionConfig | None) -> VisionGeometry:
    sizes = (16, 2, 2) if vision is None else (vision.patch_size, vision.merge_size, vision.temporal_patch_size)
    return VisionGeometry(*sizes, *pixel_limits(settings, DEFAULT_MIN_PIXELS, DEFAULT_MAX_PIXELS))


def pixel_limits(settings: Json, least: int, most: int) -> tuple[int, int]:
    """Return the pixel limits in a preprocessor's settings, by default these. ValueError for an unsupported normalisation."""
    for key in ("image_mean", "image_std"):  # preprocess.py computes x / 127.5 - 1 and nothing else
        if any(value != 0.5 for value in settings.get(key, ())):
            raise ValueError(f"{key} must be 0.5 for every channel, got {settings[key]}")
    limits = {"shortest_edge": least, "longest_edge": most, **settings.get("size", {}), **settings}
    return int(limits.get("min_pixels", limits["shortest_edge"])), int(limits.get("max_pixels", limits["longest_edge"]))


def _sampling(generation: Json) -> SamplingDefaults:
    greedy = generation.get("do_sample") is False
    return SamplingDefaults(
        temperature=0.0 if greedy else float(generation.get("temperature", 1.0)),
        top_p=float(generation.get("top_p", 1.0)),
        top_k=int(generation.get("top_k", 0)),
        min_p=float(generation.get("min_p", 0.0)),
        repetition_penalty=float(generation.get("repetition_penalty", 1.0)),
    )


def _eagle3(config: Json, model: TextConfig) -> Eagle3Config:
    """Read a published layout; the layer's entries may be nested. What is missing is the model's, as are sizes that both share."""
    layer = config.get("transformer_layer_config", config)
    for name, supported in (("num_hidden_layers", 1), ("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if (found := layer.get(name, supported)) != supported:
            raise ValueError(f"{name} of an EAGLE-3 head must be {supported!r}, got {found!r}")
    name, rope = "eagle_aux_hidden_state_layer_ids", _rotary(layer, model.rope_theta)
    taps = config.get(name) or [1 + i for i in config.get("eagle_config", {}).get(name, ())]
    taps = taps or [2, model.num_layers // 2, model.num_layers - 3]
    if len(taps) != 3 or not all(type(tap) is int and 0 <= tap < model.num_layers for tap in taps):
        raise ValueError(f"{name} must name three layers of the model, got {taps}")
    half = model.head_dim // 2
    section = tuple(rope.get("mrope_section", (half, 0, 0)))  # one axis
    if len(section) != 3 or sum(section) != half or not rope.get("mrope_interleaved", True):
        raise ValueError(f"mrope_section of an EAGLE-3 head must be interleaved and sum to {half}, got {section}")
    defaults = {"intermediate_size": model.intermediate_size or 3 * model.hidden_size}
    defaults["draft_vocab_size"] = layer.get("vocab_size", min(32_000, model.vocab_size))
    sizes = {**defaults, **layer, **config}
    text = replace(
        model,
        intermediate_size=_size(sizes, "intermediate_size"),
        vocab_size=_size(sizes, "draft_vocab_size"),
        rms_norm_eps=float(layer.get("rms_norm_eps", model.rms_norm_eps)),
        rope_theta=float(rope["rope_theta"]),
        rotary_dim=model.head_dim,
        mrope_section=section,
        llama3=rope["llama3"],
        has_qk_norm=layer.get("model_type") == "qwen3",
        format="plain",
        plain_modules=(),
        rules=(),
        quantized_to=None,
        moe=None,
        head_path="eagle3",
    )
    return Eagle3Config(tuple(taps), text, bool(config.get("norm_before_residual", False)))
