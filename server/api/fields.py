"""Fields of the OpenAI, vLLM and SGLang dialects that the schemas do not read: what may be in them. Checked by `generation.py`.

A field is *read* (in a schema), *limited* (not implemented, and it would change the answer: only the values here pass, and null),
*harmless* (it changes no answer of this server, whatever is in it) or *unknown* (the same, and named once in the log). To implement one,
move it to a schema.
"""

import json
import logging
from typing import Any

from server.errors import RequestError

logger = logging.getLogger(__name__)

MAX_LOGGED_FIELDS = 100

# The values that mean "off", or what this server does anyway.
LIMITED: dict[str, tuple[object, ...]] = {
    # OpenAI
    "best_of": (1,),
    "suffix": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": ("medium",),
    "verbosity": ("medium",),
    # vLLM, much of it SGLang's too
    "prompt_embeds": (),
    "prompt_logprobs": (0,),
    "logprob_token_ids": (),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),  # of a truncation that is not asked for
    "chat_template": (),
    "documents": ([],),
    "media_io_kwargs": ({},),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "thinking_token_budget": (-1,),
    "include_reasoning": (True,),
    "repetition_detection": (),
    "watermarking": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_token_strs": (False,),
    "structural_tag": (),  # in `response_format` and `structured_outputs` it is read
    "normalize": (True,),
    "use_activation": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "max_tokens_per_doc": (),
    "return_token_offsets": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    # SGLang
    "stop_regex": ([],),
    "lora_path": (),
    "session_params": ({},),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "return_prompt_token_ids": (False,),
    "return_meta_info": (False,),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "input_ids": (),
    "ngram_corpus_id": (),
    "images_config": ({},),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "use_audio_in_video": (False,),
    "task": (),
    # of no dialect, but sent at the top level where clients flatten what belongs elsewhere
    "min_pixels": (),
    "max_pixels": (),
    "thinking": (),
}

HARMLESS = frozenset({
    "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "prediction", "request_id", "rid", "session_id", "add_special_tokens", "spaces_between_special_tokens", "stream_interval",
    "extra_key", "custom_labels", "guided_decoding_backend", "routed_experts_start_len", "routed_experts_prompt_start",
    "return_mm_kwargs", "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank",
    "data_parallel_rank",
})  # fmt: skip

# Of an image part, beside its URL.
LIMITED_IN_IMAGES: dict[str, tuple[object, ...]] = {
    "resized_height": (),
    "resized_width": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "modalities": ("image",),
}


def check_limited(name: str, value: object, allowed: tuple[object, ...], path: str) -> None:
    """RequestError 400 that says what may be there."""
    if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
        return
    values = " or ".join(json.dumps(one) for one in allowed)
    words = f"may only be {values} on this server" if allowed else "is not supported by this server"
    raise RequestError(400, f"{path}: {words}; or leave it out.", path, "unsupported_value")


class UnknownFields:
    """Names each unknown field once in the log, and at most MAX_LOGGED_FIELDS of them: clients choose the names."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def check(self, extra: dict[str, Any]) -> None:
        """Looks at what a schema did not read. RequestError 400 for a limited field with another value."""
        for name, value in extra.items():
            if name in LIMITED:
                check_limited(name, value, LIMITED[name], name)
            elif name not in HARMLESS:
                self.note(name)

    def note(self, name: str) -> None:
        if name not in self._seen and len(self._seen) < MAX_LOGGED_FIELDS:
            self._seen.add(name)
            logger.info("requests carry the unknown field %r, which is ignored", name[:100])
