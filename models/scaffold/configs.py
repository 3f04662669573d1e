"""JSON files of a model folder except the tokenizer's, in the layout of the published checkpoints."""

from models.config.formats import FORMATS, Format
from models.config.types import MEDIA_KINDS
from models.scaffold.shapes import Shape
from models.scaffold.tokenizer import special_token_ids

Json = dict[str, object]


def config_files(shape: Shape, format: Format = "plain") -> dict[str, Json]:
    """Return the files by name. `format`: of the decoder's matrices. Sampling is that of the published Instruct checkpoints; a `size` is an
    area in pixels, for videos that of all frames."""
    ids = special_token_ids(shape.num_base_tokens)
    settings = FORMATS[format].settings
    quantization = {"quantization_config": {**settings, "modules_to_not_convert": ["lm_head", "model.visual"]}} if settings else {}
    images: Json = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 4_096, "longest_edge": 25_165_824}}
    generation: Json = {
        "bos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "do_sample": True,
        "repetition_penalty": 1.0,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    }
    return {
        "config.json": _config(shape, ids) | quantization,
        "generation_config.json": generation,
        "preprocessor_config.json": images,
        "video_preprocessor_config.json": images | videos,
    }


def _config(shape: Shape, ids: dict[str, int]) -> Json:
    family, kind = ("Qwen3VL", "qwen3_vl") if shape.delta is None else ("Qwen3_5", "qwen3_5")
    if shape.experts:
        family, kind = f"{family}Moe", f"{kind}_moe"
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": kind,
        "dtype": shape.dtype,
        **{f"{medium}_token_id": ids[f"<|{medium}_pad|>"] for medium in MEDIA_KINDS},
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": shape.tied,
        "text_config": {
            "model_type": f"{kind}_text",
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>" if shape.delta is None else "<|endoftext|>"],
            **_text_config(shape),
        },
        "vision_config": {"model_type": kind, **_vision_config(shape)},
    }


def _text_config(shape: Shape) -> Json:
    config: Json = {
        "attention_bias": False,
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
    rope = {"mrope_interleaved": True, "mrope_section": list(shape.mrope_section), "rope_type": "default"}
    if shape.experts:
        config |= {
            "moe_intermediate_size": shape.experts.intermediate,
            "num_experts": shape.experts.count,
            "num_experts_per_tok": shape.experts.per_token,
            **({"norm_topk_prob": True} if shape.delta is None else {"shared_expert_intermediate_size": shape.experts.shared}),
        }
    if shape.delta is None:
        return config | {"rope_scaling": rope, "rope_theta": 5_000_000}
    return config | {
        "rope_parameters": {**rope, "partial_rotary_factor": 0.25, "rope_theta": 10_000_000},
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


def _vision_config(shape: Shape) -> Json:
    return {
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
