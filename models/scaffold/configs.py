"""JSON files of a model folder except the tokenizer's, in the layout of the published checkpoints."""

from models.config.formats import FORMATS, Format
from models.config.types import MEDIA_KINDS
from models.scaffold.shapes import Shape
from models.scaffold.tokenizer import special_token_ids


def config_json(shape: Shape) -> dict[str, object]:
    """Return config.json for transformers and `read_config`."""
    ids = special_token_ids(shape.num_base_tokens)
    return {
        "architectures": [f"Qwen3{'VL' if shape.delta is None else '_5'}{'Moe' if shape.experts else ''}ForConditionalGeneration"],
        "model_type": _model_type(shape),
        "dtype": shape.dtype,
        **{f"{kind}_token_id": ids[f"<|{kind}_pad|>"] for kind in MEDIA_KINDS},
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": shape.tied,
        "text_config": _text_config(shape, ids["<|endoftext|>"], ids["<|im_end|>" if shape.delta is None else "<|endoftext|>"]),
        "vision_config": _vision_config(shape),
    }


def _model_type(shape: Shape) -> str:
    return ("qwen3_vl" if shape.delta is None else "qwen3_5") + ("_moe" if shape.experts else "")


def _text_config(shape: Shape, bos: int, eos: int) -> dict[str, object]:
    return {
        **_experts_config(shape),
        **_rope_config(shape),
        **_delta_config(shape),
        "model_type": f"{_model_type(shape)}_text",
        "attention_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "dtype": shape.dtype,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 262_144,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocab_size,
    }


def _rope_config(shape: Shape) -> dict[str, object]:
    rope = {"mrope_interleaved": True, "mrope_section": list(shape.mrope_section), "rope_type": "default"}
    if shape.delta is None:
        return {"rope_scaling": rope, "rope_theta": 5_000_000}
    return {"rope_parameters": {**rope, "partial_rotary_factor": 0.25, "rope_theta": 10_000_000}}


def _delta_config(shape: Shape) -> dict[str, object]:
    if shape.delta is None:
        return {}
    return {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(shape.layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": shape.delta.dim,
        "linear_num_key_heads": shape.delta.key_heads,
        "linear_num_value_heads": shape.delta.value_heads,
        "linear_value_head_dim": shape.delta.dim,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }


def _experts_config(shape: Shape) -> dict[str, object]:
    if shape.experts is None:
        return {}
    return {
        "moe_intermediate_size": shape.experts.intermediate,
        "num_experts": shape.experts.count,
        "num_experts_per_tok": shape.experts.per_token,
        **({"norm_topk_prob": True} if shape.delta is None else {"shared_expert_intermediate_size": shape.experts.shared}),
    }


def _vision_config(shape: Shape) -> dict[str, object]:
    return {
        "model_type": _model_type(shape),
        "deepstack_visual_indexes": list(shape.deepstack),
        "depth": shape.vision_depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": shape.vision_hidden,
        "in_channels": 3,
        "intermediate_size": shape.vision_intermediate,
        "num_heads": shape.vision_heads,
        "num_position_embeddings": 2304,
        "out_hidden_size": shape.hidden,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def quantization_json(format: Format) -> dict[str, object]:
    """Return the entries of config.json for this format of the decoder's matrices."""
    settings = FORMATS[format].settings
    return {"quantization_config": {**settings, "modules_to_not_convert": ["lm_head", "model.visual"]}} if settings else {}


def generation_config_json(shape: Shape) -> dict[str, object]:
    """Return generation_config.json: stop tokens and sampling of the published Instruct checkpoints."""
    ids = special_token_ids(shape.num_base_tokens)
    return {
        "bos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "do_sample": True,
        "repetition_penalty": 1.0,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    }


def image_processor_json() -> dict[str, object]:
    """Return preprocessor_config.json; `size` is an area in pixels."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
