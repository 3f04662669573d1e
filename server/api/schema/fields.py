"""Fields that the schemas do not read: those of REFUSED would change the answer, all others are ignored."""

from typing import Any

from server.api.schema.validate import UNSUPPORTED, bad_value

Refused = dict[str, tuple[object, ...]]
OFF: tuple[object, ...] = (None, False, [], {})
NAMES = """audio audio_data background chat_template container conversation custom_logit_processor documents echo functions
guided_choice guided_grammar guided_json guided_regex
guided_whitespace_pattern input_embeds input_ids logits_processors logprob_token_ids lora_path max_pixels max_tokens_per_doc media_io_kwargs
min_pixels output_format previous_response_id prompt prompt_embeds return_hidden_states return_routed_experts session_params stop_regex
structural_tag suffix thinking token_ids_logprob use_beam_search video_data web_search_options"""
IMAGE_NAMES = """frames_indices max_dynamic_patch max_frames max_tokens_per_frame min_dynamic_patch min_frames resized_height
resized_width timestamps"""

# Refused fields, with the values in addition to OFF that mean what this server does.
REFUSED: Refused = {name: () for name in NAMES.split()} | {
    "best_of": (1,), "embed_dtype": ("float32",), "endianness": ("native", "little"), "function_call": ("none", "auto"),
    "length_penalty": (1,), "modalities": (["text"], ["image"], ["multi-images"], ["video"]), "normalize": (True,),
    "separate_reasoning": (True,), "stream_reasoning": (True,), "task": ("embed",), "truncation": ("disabled",),
    "truncation_side": ("left",), "use_activation": (True,),
}  # fmt: skip
REFUSED_IN_IMAGES: Refused = {name: () for name in IMAGE_NAMES.split()}


def check_refused(fields: dict[str, Any], refused: Refused = REFUSED, prefix: str = "") -> None:
    """Raise RequestError 400 for a refused field with another value."""
    for name in fields.keys() & refused.keys():
        if fields[name] not in (*OFF, *refused[name]):
            raise bad_value(prefix + name, "this server does not support this field", UNSUPPORTED)
