"""Fields of several servers' dialects that the schemas do not read, and their accepted values.

A field is *limited* (it would change the answer: only null and the values here are accepted), *harmless* (it never changes an answer) or
*unknown* (ignored, with a warning, and logged once).
"""

import json
import logging
from typing import Any

from server.api.schema.validate import UNSUPPORTED, bad_value

logger = logging.getLogger(__name__)

MAX_LOGGED = 100
Limits = dict[str, tuple[object, ...]]


def limits_of(*rows: tuple[tuple[object, ...], str]) -> Limits:
    return {name: allowed for allowed, names in rows for name in names.split()}


# Values that mean "off", or the server's own behaviour.
LIMITED = limits_of(
    ((), "audio chat_template custom_logit_processor guided_whitespace_pattern input_ids logprob_token_ids lora_path max_dynamic_patch"),
    ((), "max_pixels max_tokens_per_doc min_dynamic_patch min_pixels moderation ngram_corpus_id prompt_embeds repetition_detection suffix"),
    ((), "audio_data input_embeds media_io_kwargs structural_tag thinking video_data web_search_options"),
    ((False,), "echo return_cached_tokens_details return_hidden_states return_meta_info return_prompt_text return_prompt_token_ids"),
    ((False,), "return_routed_experts return_token_offsets return_token_strs use_beam_search"),
    ((False,), "use_audio_in_video watermarking"),
    ((True,), "normalize separate_reasoning stream_reasoning use_activation"),
    (([],), "documents functions logits_processors stop_regex token_ids_logprob"),
    (({},), "custom_params ec_transfer_params images_config kv_transfer_params session_params vllm_xargs"),
    ((1,), "best_of length_penalty"),
    ((["text"],), "modalities"),
    (("none", "auto"), "function_call"),
    (("embed",), "task"),
    (("float32",), "embed_dtype"),
    (("native", "little"), "endianness"),
)
# Fields of chat completions that translated dialects name differently or cannot answer.
LIMITED_IN_DIALECTS = limits_of(
    ((), "max_completion_tokens prompt_logprobs response_format"),
    ((False,), "logprobs return_token_ids return_tokens_as_token_ids"),
    ((1,), "n"),
)
HARMLESS = frozenset(limits_of(((),
    """add_special_tokens bootstrap_host bootstrap_port bootstrap_room custom_labels data_parallel_rank disagg_prefill_dp_rank extra_key
    guided_decoding_backend metadata prompt_cache_key prompt_cache_options prompt_cache_retention request_id return_mm_kwargs
    routed_dp_rank routed_experts_prompt_start routed_experts_start_len safety_identifier service_tier session_id
    spaces_between_special_tokens store stream_interval"""
)))  # fmt: skip
LIMITED_IN_IMAGES = limits_of(
    ((), "frames_indices max_dynamic_patch max_frames max_tokens_per_frame min_dynamic_patch min_frames resized_height resized_width"),
    ((), "timestamps"),
    (("image", "multi-images", "video"), "modalities"),
)


def check_limited(fields: dict[str, Any], limits: Limits, prefix: str = "") -> None:
    """Raise RequestError 400 for a limited field with another value."""
    for name in fields.keys() & limits.keys():
        value, allowed = fields[name], limits[name]
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            continue
        values = " or ".join(map(json.dumps, (*allowed, None)))
        raise bad_value(prefix + name, f"Input should be {values}: this server does not support it", UNSUPPORTED)


def unknown_fields(extra: dict[str, Any]) -> list[str]:
    return [name for name in extra if name not in LIMITED and name not in HARMLESS]


class LogOnce:
    """Log of lines about requests: each is logged once, and at most MAX_LOGGED, since clients choose the names in them."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, words: str) -> None:
        if words not in self._seen and len(self._seen) < MAX_LOGGED:
            self._seen.add(words)
            logger.info("%s", words)
