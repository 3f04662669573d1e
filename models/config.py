"""What a checkpoint folder says about its model, as typed values: the one adapter of Hugging Face configuration files, in the layout of
transformers 5 (`rope_parameters`) and of the published checkpoints (`rope_scaling`, `rope_theta`). Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from models.backends.heads import Heads
from models.cache import CacheSpec, PagedGroup, StateGroup
from models.geometry import VisionGeometry
from models.registry import Architecture, architecture_of
from models.text_settings import rotary, with_no_tower
from models.video import VideoGeometry

# For folders without preprocessor_config.json: those of the published checkpoints.
DEFAULT_MIN_PIXELS = 65_536
DEFAULT_MAX_PIXELS = 16_777_216
DEFAULT_MIN_VIDEO_PIXELS = 4_096
DEFAULT_MAX_VIDEO_PIXELS = 25_165_824

FILE_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "merge_size": "spatial_merge_size",
}


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Every layer has these experts in place of one SwiGLU. The weights of those that the router gives a token sum to one."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    has_shared: bool = False  # one more, that every token is given, by a weight of its own


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Gated DeltaNet, which some layers have in place of attention: see `layers.delta`. Value heads share key heads in groups."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel_size: int  # of the convolution over time

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: those of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def parameters(self) -> int:
        """Of the matrices, for each value of the hidden size."""
        return self.conv_width + 2 * self.num_value_heads * (self.value_dim + 1)

    @property
    def step_values(self) -> int:
        """Activations of a layer and token: its inputs, before and behind the convolution, changes and outputs of chunks of 64."""
        width = self.num_value_heads * self.value_dim
        return 2 * self.conv_width + 5 * width + 64 * self.num_value_heads

    def state_bytes(self, tp: int, dtype_bytes: int) -> int:
        """Of a layer and row: the recurrent state in float32 and the last inputs of the convolution, of one rank's heads."""
        recurrent = 4 * self.num_value_heads * self.key_dim * self.value_dim
        return (recurrent + (self.kernel_size - 1) * self.conv_width * dtype_bytes) // tp

    def draft_bytes(self, tp: int, dtype_bytes: int) -> int:
        """What a draft is repeated from: its inputs before and behind the convolution, and its gates; rounded up to keep rows aligned."""
        return -(-2 * (self.conv_width + self.num_value_heads) // tp * dtype_bytes // 64) * 64


@dataclass(frozen=True, slots=True)
class TextConfig:
    """`head_dim` is never inferred from `hidden_size`: 32B has 64 heads of 128 on a hidden size of 5120."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int  # values of a head that are rotated, its first ones
    mrope_section: tuple[int, int, int]  # rotary pairs that follow time, height, width; sums to rotary_dim / 2
    max_position_embeddings: int
    llama3: tuple[float, ...] = ()  # of its rotary scaling: factor, low and high frequency factor, original positions; empty: unscaled
    has_qk_norm: bool = True  # RMSNorm of the heads of queries and keys
    is_fp8: bool = False  # the layers' matrices are stored as float8 in scaled blocks of 128 x 128
    moe: MoeConfig | None = None
    delta: DeltaConfig | None = None
    delta_layers: frozenset[int] = frozenset()  # the layers that have it; the others have attention, with a gate on its output
    has_head: bool = False  # see `layers.head`; an attention layer more

    @property
    def layer_parameters(self) -> int:
        """Of a layer's matrices, those that a token is multiplied by; without a router's. The mean over the layers."""
        if self.moe is None:
            return self._matrices(self.intermediate_size)
        return self._matrices((self.moe.num_experts_per_tok + self.moe.has_shared) * self.moe.intermediate_size)

    @property
    def stored_layer_parameters(self) -> int:
        """Of all of them, every expert's included."""
        if self.moe is None:
            return self._matrices(self.intermediate_size)
        return self._matrices((self.moe.num_experts + self.moe.has_shared) * self.moe.intermediate_size)

    def ordinal(self, layer: int) -> int:
        """Of a layer among those of its kind."""
        num_delta = sum(other < layer for other in self.delta_layers)
        return num_delta if layer in self.delta_layers else layer - num_delta

    def heads(self, tp: int) -> Heads:
        """Of each of `tp` ranks. With more ranks than KV heads each has one."""
        return Heads(self.num_heads // tp, max(1, self.num_kv_heads // tp), self.head_dim, self.rotary_dim)

    def cache_spec(self, tp: int, dtype_bytes: int) -> CacheSpec:
        """Of each of `tp` ranks."""
        num_paged = self.num_layers - len(self.delta_layers) + self.has_head
        paged = PagedGroup(num_paged, self.heads(tp).num_kv, self.head_dim, dtype_bytes)
        if self.delta is None:
            return CacheSpec(paged)
        sizes = self.delta.state_bytes(tp, dtype_bytes), self.delta.draft_bytes(tp, dtype_bytes)
        return CacheSpec(paged, (StateGroup(len(self.delta_layers), *sizes),))

    def _matrices(self, inner: int) -> int:
        num_queries = self.num_heads if self.delta is None else self.num_heads * 3 / 2  # with the gate
        attention = int(2 * (num_queries + self.num_kv_heads) * self.head_dim)
        num_delta = len(self.delta_layers)
        mixers = (self.num_layers - num_delta) * attention + (0 if self.delta is None else num_delta * self.delta.parameters)
        return self.hidden_size * (mixers // self.num_layers + 3 * inner)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """DeepStack level i is taken after block `deepstack_indexes[i]` and added after decoder layer i."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    out_hidden_size: int
    num_position_embeddings: int  # a square grid, 48 x 48 in every published size
    deepstack_indexes: tuple[int, ...]
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What generation_config.json recommends where a request is silent. `top_k` 0 means off."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All that the engine needs to know of a checkpoint besides its weights."""

    text: TextConfig
    vision: VisionConfig
    architecture: Architecture
    geometry: VisionGeometry
    video: VideoGeometry
    sampling: SamplingDefaults
    dtype: str  # "bfloat16", "float16" or "float32": that of the stored weights
    tie_word_embeddings: bool
    image_token_id: int  # -1: the model has no vision
    video_token_id: int | None  # None: the model takes no videos
    vision_start_token_id: int
    vision_end_token_id: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_visual_levels(self) -> int:
        """Rows of one visual token: the main embedding and one per DeepStack level."""
        return 1 + len(self.vision.deepstack_indexes)

    @classmethod
    def from_folder(cls, folder: Path, with_head: bool = False) -> "ModelConfig":
        """Reads config.json, generation_config.json and the preprocessors' files. ValueError names what is not supported, or lacking."""
        config = _read_json(folder / "config.json", is_required=True)
        architecture = architecture_of(config)
        if not architecture.has_tower:
            config = with_no_tower(config)
        head = [config["text_config"].get(f"mtp_{name}", 0) for name in ("num_hidden_layers", "use_dedicated_embeddings")]
        if with_head and head != [1, False]:
            raise ValueError(f"the model has no head of one layer with its embeddings that predicts further tokens: it has {head[0]}")
        _reject_unsupported(config)
        generation = _read_json(folder / "generation_config.json")
        vision = _vision(config["vision_config"])
        text = config["text_config"]
        return cls(
            text=_text(text, _is_fp8(config.get("quantization_config")), with_head),
            vision=vision,
            architecture=replace(architecture, dropped=None) if with_head else architecture,
            geometry=_geometry(_read_json(folder / "preprocessor_config.json"), vision),
            video=_video_geometry(folder, vision),
            sampling=_sampling(generation),
            dtype=str(_first((config, text), ("dtype", "torch_dtype"), "bfloat16")),
            tie_word_embeddings=bool(_first((config, text), ("tie_word_embeddings",), False)),
            image_token_id=config["image_token_id"],
            video_token_id=config.get("video_token_id"),
            vision_start_token_id=config["vision_start_token_id"],
            vision_end_token_id=config["vision_end_token_id"],
            eos_token_ids=_all_ids(generation, config, text),
        )


def _read_json(path: Path, is_required: bool = False) -> dict[str, Any]:
    if not path.is_file() and not is_required:
        return {}
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a model folder: it has no {path.name}")
    loaded = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(loaded, dict):
        raise ValueError(f"{path.name} must hold a JSON object")
    return loaded


def _first(sources: tuple[Mapping[str, Any], ...], keys: tuple[str, ...], default: object) -> Any:
    """The first value that any source holds under any of the keys."""
    for source in sources:
        for key in keys:
            if source.get(key) is not None:
                return source[key]
    return default


def _renamed(kind: type, config: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass: those given, the others from the file."""
    names = [field.name for field in fields(kind) if field.name not in given]
    return {name: config[FILE_NAMES.get(name, name)] for name in names} | given


def _all_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end token that a file names: a generation may end with another one than a text."""
    found = [source["eos_token_id"] for source in sources if source.get("eos_token_id") is not None]
    return tuple(dict.fromkeys(token_id for value in found for token_id in ([value] if isinstance(value, int) else value)))


def _reject_unsupported(config: Mapping[str, Any]) -> None:
    text, vision = config["text_config"], config["vision_config"]
    if config["model_type"].endswith("_moe") != bool(_num_experts(text)):
        raise ValueError(f"text_config.num_experts does not go with model_type {config['model_type']!r}")
    for found, supported, name in (
        (text.get("hidden_act", "silu"), "silu", "text_config.hidden_act"),
        (vision.get("hidden_act", "gelu_pytorch_tanh"), "gelu_pytorch_tanh", "vision_config.hidden_act"),
        (text.get("attention_bias", False), False, "text_config.attention_bias"),
        (text.get("mlp_bias", False), False, "mlp_bias"),
        (text.get("use_sliding_window", False), False, "use_sliding_window"),
        (text.get("norm_topk_prob", True), True, "text_config.norm_topk_prob"),
        (text.get("decoder_sparse_step", 1), 1, "text_config.decoder_sparse_step"),
        (text.get("mlp_only_layers") or [], [], "text_config.mlp_only_layers"),
        (text.get("attn_output_gate", _is_hybrid(text)), _is_hybrid(text), "text_config.attn_output_gate"),
        (text.get("mamba_ssm_dtype", "float32"), "float32", "text_config.mamba_ssm_dtype"),
    ):
        if found != supported:
            raise ValueError(f"{name} must be {supported!r}, got {found!r}")


def _is_fp8(quantization: Mapping[str, Any] | None) -> bool:
    """Whether the weights are as in the published FP8 checkpoints. ValueError if quantized otherwise."""
    if quantization is None:
        return False
    for name, supported in (("quant_method", "fp8"), ("weight_block_size", [128, 128]), ("activation_scheme", "dynamic"), ("fmt", "e4m3")):
        if (found := quantization.get(name, supported)) != supported:
            raise ValueError(f"quantization_config.{name} must be {supported!r}, got {found!r}")
    if not {"quant_method", "weight_block_size"} <= quantization.keys():
        raise ValueError("quantization_config must name quant_method and weight_block_size")
    return True


def _text(config: Mapping[str, Any], is_fp8: bool, has_head: bool) -> TextConfig:
    rope, is_hybrid = rotary(config), _is_hybrid(config)
    rotary_dim = int(config["head_dim"] * _first((rope, config), ("partial_rotary_factor",), 0.25 if is_hybrid else 1.0))
    section = tuple(_first((rope, config), ("mrope_section",), (11, 11, 10) if is_hybrid else (24, 20, 20)))
    if len(section) != 3 or sum(section) != rotary_dim // 2:
        raise ValueError(f"mrope_section must be three numbers that sum to half of the rotary values ({rotary_dim}), got {section}")
    given = {"rope_theta": float(rope["rope_theta"]), "rotary_dim": rotary_dim, "mrope_section": section}
    given |= {"llama3": rope["llama3"], "has_qk_norm": config.get("model_type") != "llama"}
    given |= {"is_fp8": is_fp8, "has_head": has_head, "moe": _moe(config), "delta": _delta(config), "delta_layers": _delta_layers(config)}
    if given["moe"] is not None:
        given["intermediate_size"] = config.get("intermediate_size", 0)  # of no layer
    return TextConfig(**_renamed(TextConfig, config, given))


def _is_hybrid(config: Mapping[str, Any]) -> bool:
    return "linear_num_value_heads" in config


def _delta(config: Mapping[str, Any]) -> DeltaConfig | None:
    if not _is_hybrid(config):
        return None
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    delta = DeltaConfig(*(int(config[f"linear_{name}"]) for name in names))
    if delta.num_value_heads % delta.num_key_heads:
        raise ValueError(f"linear_num_value_heads must be a multiple of linear_num_key_heads, got {delta}")
    return delta


def _delta_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """By `layer_types`, or else all but every n-th. ValueError unless some layers have attention."""
    if not _is_hybrid(config):
        return frozenset()
    num_layers, interval = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    regular = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers)]
    kinds = config.get("layer_types") or regular
    if len(kinds) != num_layers or set(kinds) != {"linear_attention", "full_attention"}:
        raise ValueError("text_config.layer_types must name linear_attention or full_attention for every layer, and each at least once")
    return frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention")


def _num_experts(config: Mapping[str, Any]) -> int:
    return int(_first((config,), ("num_experts", "num_local_experts"), 0))  # transformers 5 writes the latter


def _moe(config: Mapping[str, Any]) -> MoeConfig | None:
    if not _num_experts(config):
        return None
    size, shared_size = config["moe_intermediate_size"], config.get("shared_expert_intermediate_size") or 0
    if shared_size not in (0, size):
        raise ValueError(f"shared_expert_intermediate_size must be moe_intermediate_size ({size}), as in every published model")
    moe = MoeConfig(_num_experts(config), config["num_experts_per_tok"], size, shared_size > 0)
    if not 0 < moe.num_experts_per_tok <= moe.num_experts:
        raise ValueError(f"num_experts_per_tok must be 1 to num_experts ({moe.num_experts}), got {moe.num_experts_per_tok}")
    return moe


def _vision(config: Mapping[str, Any]) -> VisionConfig:
    rope = config.get("rope_parameters") or {}
    given = {"num_heads": config["num_heads"], "deepstack_indexes": tuple(config.get("deepstack_visual_indexes") or ())}
    given["rope_theta"] = float(rope.get("rope_theta", 10_000.0))
    return VisionConfig(**_renamed(VisionConfig, config, given))


def _check_normalisation(preprocessor: Mapping[str, Any]) -> None:
    for key in ("image_mean", "image_std"):  # preprocess.py computes x / 127.5 - 1 and nothing else
        if any(value != 0.5 for value in preprocessor.get(key, ())):
            raise ValueError(f"{key} must be 0.5 for every channel, got {preprocessor[key]}")


def _video_geometry(folder: Path, vision: VisionConfig) -> VideoGeometry:
    """Of video_preprocessor_config.json, or the part of processor_config.json that takes its place."""
    saved = _read_json(folder / "processor_config.json").get("video_processor")
    settings = saved or _read_json(folder / "video_preprocessor_config.json")
    _check_normalisation(settings)
    size = settings.get("size") or {}
    return VideoGeometry(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=int(_first((settings, size), ("min_pixels", "shortest_edge"), DEFAULT_MIN_VIDEO_PIXELS)),
        max_pixels=int(_first((settings, size), ("max_pixels", "longest_edge"), DEFAULT_MAX_VIDEO_PIXELS)),
        fps=float(_first((settings,), ("fps",), 2.0)),
        min_frames=int(_first((settings,), ("min_frames",), 4)),
        max_frames=int(_first((settings,), ("max_frames",), 768)),
        num_frames=settings.get("num_frames"),
        samples=bool(_first((settings,), ("do_sample_frames",), True)),
        max_frame_tokens=int(_first((settings,), ("max_video_tokens",), 768)) if settings.get("cap_pixels_per_frame") else None,
    )


def _geometry(preprocessor: Mapping[str, Any], vision: VisionConfig) -> VisionGeometry:
    _check_normalisation(preprocessor)
    size = preprocessor.get("size") or {}
    return VisionGeometry(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=int(_first((preprocessor, size), ("min_pixels", "shortest_edge"), DEFAULT_MIN_PIXELS)),
        max_pixels=int(_first((preprocessor, size), ("max_pixels", "longest_edge"), DEFAULT_MAX_PIXELS)),
    )


def _sampling(generation: Mapping[str, Any]) -> SamplingDefaults:
    greedy = generation.get("do_sample") is False
    return SamplingDefaults(
        temperature=0.0 if greedy else float(generation.get("temperature", 1.0)),
        top_p=float(generation.get("top_p", 1.0)),
        top_k=int(generation.get("top_k", 0)),
        min_p=float(generation.get("min_p") or 0.0),
        repetition_penalty=float(generation.get("repetition_penalty") or 1.0),
    )
